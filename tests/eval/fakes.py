"""What evaluation needs of a tokenizer, small enough to count by hand: a token is a word, a mark or a line break."""

import re


class Words:
    """`template`: has a chat template, of four tokens around the message."""

    def __init__(self, template: bool = True, name: str = "words") -> None:
        self.has_chat_template, self.name = template, name

    def encode(self, text, add_special_tokens=True):
        ids = [len(piece) for piece in re.findall(r"\w+|[^\w\s]|\n", text)]
        return [1, *ids] if add_special_tokens else ids

    def render_chat(self, messages):
        return "".join(f"[user] {m['content']}" for m in messages) + "[assistant] "

    def digest(self):
        return self.name
