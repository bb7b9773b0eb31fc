"""Small sets of our own in the published form."""

import json

ROWS = {
    "qasper": [
        ("The mill is red. " * 30, "What colour is the mill?", ["red", "It is red"]),
        ("Short.", "Why?", ["no"]),
    ],
    "trec": [("Question: Who?\nType: person", "Question: When?\nType:", ["date"])],
    "lcc": [("x = 1\n", "", ["y = 2"])],
    "passage_retrieval_zh": [("段落1：磨坊。", "磨坊", ["段落1"])],
    "multifieldqa_zh": [("磨坊是红色的。", "什么颜色？", ["红色"])],
}


def write(folder):
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        classes = ["date", "person"] if name == "trec" else None
        lines = [
            {
                "context": context,
                "input": asked,
                "answers": answers,
                "all_classes": classes,
                "length": 1,
                "dataset": name,
            }
            for context, asked, answers in rows
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, "utf-8")
    return folder
