"""Text to token ids and back: tokenizer.json, chat templates, stop tokens, and decoding of a stream."""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from clo_jax.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when the file is not there."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
    return value


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise CheckpointError(f"{path}: is not there; without it only token ids can be given and are returned")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception for a malformed file.
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from None


def stop_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Tokens that end a generation: `eos_token_id` of generation_config.json, else of config.json (an integer or a list
    in both), else the `eos_token` of tokenizer_config.json; empty when none is given.

    Raises:
      CheckpointError: a value that is neither; names file and key.
    """
    folder = Path(folder)
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id: got {value!r}, wanted a token id or a list of them")
        return tuple(dict.fromkeys(ids))
    eos = _special_tokens(_read_object(folder / _TOKENIZER_CONFIG)).get("eos_token")
    if eos is None or not (folder / TOKENIZER_FILE).exists():
        return ()
    token = _load_tokenizer(folder / TOKENIZER_FILE).token_to_id(eos)
    return () if token is None else (token,)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, from tokenizer_config.json: a text, or an object with the text as `content`."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found


class Tokenizer:
    """The tokenizer of a checkpoint folder: tokenizer.json; for chats tokenizer_config.json and chat_template.jinja.

    Make it with `Tokenizer.from_folder`. Calls from several threads are safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None, folder: Path):
        self._backend, self._template, self._folder = backend, template, folder
        self.special_tokens = _special_tokens(config)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        # A tokenizer.json may carry training-time limits; nothing is ever cut or padded here.
        backend.no_truncation()
        backend.no_padding()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads the tokenizer files of a checkpoint.

        Raises:
          CheckpointError: tokenizer.json is missing, or a file is malformed; names the file.
        """
        folder = Path(folder).expanduser()
        config = _read_object(folder / _TOKENIZER_CONFIG)
        return cls(_load_tokenizer(folder / TOKENIZER_FILE), config, _chat_template(folder, config), folder)

    @staticmethod
    def available(folder: str | Path) -> bool:
        """Whether the folder has a tokenizer.json."""
        return (Path(folder).expanduser() / TOKENIZER_FILE).exists()

    @property
    def vocab_size(self) -> int:
        """Number of known tokens, added ones included; the model may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def digest(self) -> str:
        """SHA-256 of the tokenizer and its chat template: equal ones make the same ids of the same text."""
        return hashlib.sha256(f"{self._backend.to_str()}\n{self._template}".encode()).hexdigest()

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `add_special_tokens`: add what tokenizer.json adds around a text (mostly BOS)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra) -> str:
        """The prompt that the chat template makes of messages (`{"role": ..., "content": ...}` each).

        Args:
          add_generation_prompt: end with the opening of the assistant's turn.
          extra: further names for the template (tools, documents, ...).

        Raises:
          CheckpointError: the checkpoint has no chat template, or it is broken.
          ValueError: the template refuses the messages.
        """
        if self._template is None:
            raise CheckpointError(f"{self._folder}: no chat template in {_TEMPLATE_FILE} or {_TOKENIZER_CONFIG}")
        names = {"tools": None, "documents": None, **self.special_tokens, **extra}
        try:
            template = _environment().from_string(self._template)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{self._folder}: chat template, line {error.lineno}: {error.message}") from None
        try:
            return template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra
    ) -> list[int]:
        """Token ids of `render_chat`. Nothing is added: the template writes its own special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **extra), add_special_tokens=False)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json (a text, or a list with one named default)."""
    if (folder / _TEMPLATE_FILE).exists():
        try:
            return (folder / _TEMPLATE_FILE).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / _TEMPLATE_FILE}: cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / _TOKENIZER_CONFIG}: chat_template: got {type(template).__name__}, wanted text"
        )
    return template


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for (transformers' `apply_chat_template`). Sandboxed: a template
    comes with the weights and is not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class IncrementalDecoder:
    """Text of a growing list of tokens, piece by piece.

    The pieces that `push` and a last `flush` return, put together, equal `tokenizer.decode` of all the tokens. A
    character whose bytes are spread over several tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # Tokens [0, _read) of _ids are out as text. They are decoded again with the new ones, because what a token says
        # can depend on the one before it (a leading space is dropped at the start of a text).
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these further tokens; often empty."""
        self._ids.extend(ids)
        return self._take(final=False)

    def flush(self) -> str:
        """The rest, at the end: bytes of an unfinished character become U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._read], self._skip)
        text = self._tokenizer.decode(self._ids, self._skip)
        if len(text) <= len(before) or (not final and (text.endswith(_UNFINISHED) or self._ends_in_byte_token())):
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return text[len(before) :]

    def _ends_in_byte_token(self) -> bool:
        """Whether a run of byte tokens (<0xF0>) is still open: it becomes text or U+FFFD as a whole."""
        for token in reversed(self._ids):
            if self._skip and token in self._tokenizer.special_ids:
                continue
            if (text := self._tokenizer.id_to_token(token)) is not None:
                return _BYTE_TOKEN.fullmatch(text) is not None
        return False
