"""The messages of LongBench's sets; wording is our own, in the language of the set. Few-shot sets and code have no
instruction of ours around them beyond a line: their examples say what is wanted."""

_ANSWER_ONLY = "Give the answer as briefly as possible, a name or a phrase where that is enough, and nothing else."
_ANSWER_ONLY_ZH = "请尽量简短地回答，只给出答案，不要写其他内容。"


def _question(what: str, more: str = _ANSWER_ONLY) -> str:
    return (
        f"Read {what} and answer the question after it. {more}\n\n{{context}}\n\n"
        f"Answer the question from {what} above. {more}\n\nQuestion: {{input}}\nAnswer:"
    )


def _summary(what: str) -> str:
    return f"Read {what} and write a summary of it on one page.\n\n{{context}}\n\nNow write the summary.\n\nSummary:"


PROMPTS = {
    "narrativeqa": _question("the story"),
    "qasper": _question(
        "the scientific article",
        'Be as brief as possible. When the article does not answer it, write "unanswerable"; to a question of yes or '
        'no write "yes", "no" or "unanswerable". Write nothing else.',
    ),
    "multifieldqa_en": _question("the text"),
    "multifieldqa_zh": f"阅读下面的文字，并用中文回答问题。{_ANSWER_ONLY_ZH}\n\n{{context}}\n\n问题：{{input}}\n回答：",
    "hotpotqa": _question("the passages"),
    "2wikimqa": _question("the passages"),
    "musique": _question("the passages"),
    "dureader": "请根据下面的文章回答问题。\n\n{context}\n\n问题：{input}\n回答：",
    "gov_report": _summary("the report of a government agency"),
    "qmsum": (
        "Read the transcript of a meeting and answer the request after it in one or more sentences.\n\n{context}\n\n"
        "Request: {input}\nAnswer:"
    ),
    "multi_news": _summary("the news articles"),
    "vcsum": "阅读下面的会议记录，并写一段总结，概括会议的内容。\n\n{context}\n\n会议总结：",
    "trec": "Find the type of the last question, as in the examples.\n\n{context}\n{input}",
    "triviaqa": (
        "Answer the last question from its passage, with the answer only, as in the examples.\n\n{context}\n\n{input}"
    ),
    "samsum": "Summarize the last dialogue in a few short sentences, as in the examples.\n\n{context}\n\n{input}",
    "lsht": "请按照下面的例子，判断最后一篇新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Some of the following paragraphs appear more than once. How many different paragraphs are there?\n\n"
        "{context}\n\nWrite the number of different paragraphs only, such as 1, 2, 3.\n\nThe number is:"
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs, and a summary of one of them.\n\n{context}\n\nThe summary: {input}\n\n"
        'Which paragraph is it of? Write it as "Paragraph 1", "Paragraph 2" and so on.\n\nThe answer is:'
    ),
    "passage_retrieval_zh": (
        "下面有若干段文字，以及其中一段的摘要。\n\n{context}\n\n摘要：{input}\n\n这是哪一段的摘要？请按“段落1”、“段落2”的格式"
        "回答。\n\n答案是："
    ),
    "lcc": "Complete the code below.\n{context}Next line of code:\n",
    "repobench-p": "Complete the code below.\n{context}{input}Next line of code:\n",
}
