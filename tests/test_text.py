"""Tokenizer, chat templates, stop tokens, and text out of a stream of tokens."""

import datetime
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from clo_jax.errors import CheckpointError
from clo_jax.text import IncrementalDecoder, Tokenizer, stop_token_ids
from tests.checkpoints.builders import train_tokenizer

TEXTS = [
    "plain words",
    "  spaces   and\n\nlines\t",
    "😀🤖 emoji 👩‍👩‍👧‍👦 family",
    "你好，世界。日本語のテキスト 한국어",
    "naïve café e\u0301 \u200d مرحبا",
    "",
]


def sentencepiece_like() -> tokenizers.Tokenizer:
    """What tokenizer.json of a SentencePiece model holds: ▁ for spaces, bytes as tokens, no space at the start."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁a",
        "▁w",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁", "w")], unk_token="<unk>", byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    return built


def folder(path, backend=None, template=None, **files):
    path.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module", params=[train_tokenizer, sentencepiece_like])
def tokenizer(request, tmp_path_factory):
    return Tokenizer.from_folder(folder(tmp_path_factory.mktemp("text") / "t", request.param()))


def test_texts_come_back(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("size", [1, 2, 7])
def test_streamed_text_equals_text_at_once(tokenizer, size):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        decoder, pieces = IncrementalDecoder(tokenizer), []
        for i in range(0, len(ids), size):
            pieces.append(decoder.push(ids[i : i + size]))
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) + decoder.flush() == text


def test_streamed_text_cut_anywhere_equals_text_at_once(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for end in range(len(ids)):
            decoder = IncrementalDecoder(tokenizer)
            streamed = "".join(decoder.push([token]) for token in ids[:end]) + decoder.flush()
            assert streamed == tokenizer.decode(ids[:end])


def test_streamed_noise_equals_text_at_once(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, tokenizer.vocab_size, rng.integers(1, 24)).tolist()
        decoder = IncrementalDecoder(tokenizer)
        streamed = "".join(decoder.push([token]) for token in ids) + decoder.flush()
        assert streamed == tokenizer.decode(ids)


def test_text_is_out_as_soon_as_it_is_certain(tokenizer):
    ids = tokenizer.encode("ab")
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push([token]) for token in ids) == "ab"
    assert decoder.flush() == ""


def test_special_tokens_in_a_stream(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "t", train_tokenizer()))
    ids = [1, *tokenizer.encode("fox"), 2]
    for skip, wanted in [(True, "fox"), (False, "<s>fox</s>")]:
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == wanted


def test_added_tokens_follow_the_file(tmp_path):
    backend = train_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "t", backend))
    plain = train_tokenizer().encode("the lazy dog jumps").ids
    assert len(plain) > 3
    assert tokenizer.encode("the lazy dog jumps") == [1, *plain]
    assert tokenizer.encode("the lazy dog jumps", add_special_tokens=False) == plain
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    assert tokenizer.id_to_token(2) == "</s>" and tokenizer.token_to_id("</s>") == 2


SYSTEM_FIRST = """{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {%- if loop.first and m.role != 'system' %}{{ bos_token }}system: none{{ eos_token }}{% endif %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
{{ m.role }}: {{ m.content | tojson }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
assistant:{% endif %}"""


def test_chat_template(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "not this one"}
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "t", train_tokenizer(), SYSTEM_FIRST, tokenizer_config=config))
    messages = [{"role": "user", "content": "«x» & <y>"}, {"role": "skip", "content": ""}]
    text = '<s>system: none</s>user: "«x» & <y>"</s>assistant:'  # trim_blocks takes the line ends after blocks
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text.removesuffix("assistant:")
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(messages)[0] == 1
    with pytest.raises(ValueError, match="messages: the chat template refuses them: no tools"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="messages: the chat template refuses them"):
        tokenizer.render_chat([{"role": "user"}])


def test_chat_template_of_the_configuration(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    for i, template in enumerate([named, named[1]["template"]]):
        tokenizer = Tokenizer.from_folder(
            folder(tmp_path / str(i), train_tokenizer(), tokenizer_config={"chat_template": template})
        )
        assert tokenizer.has_chat_template
        assert tokenizer.render_chat([{"role": "user", "content": "fox"}]) == "fox!"


def test_digest_tells_tokenizers_and_templates_apart(tmp_path):
    digests = [
        Tokenizer.from_folder(folder(tmp_path / name, backend, template)).digest()
        for name, backend, template in (
            ("a", sentencepiece_like(), None),
            ("b", sentencepiece_like(), None),
            ("c", sentencepiece_like(), "{{ messages }}"),
            ("d", train_tokenizer(), None),
        )
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_names_that_templates_use(tmp_path):
    template = "{{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ flag }}"
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "t", train_tokenizer(), template=template))
    years = {str(datetime.datetime.now().year), str((datetime.datetime.now() + datetime.timedelta(hours=1)).year)}
    year, rest = tokenizer.render_chat([], flag=7).split(" ", 1)
    assert year in years and rest == "True True 7"


def test_templates_are_not_trusted(tmp_path):
    template = "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "t", train_tokenizer(), template=template))
    with pytest.raises(ValueError, match="refuses them"):
        tokenizer.render_chat([])


def test_missing_and_broken_files_are_named(tmp_path):
    assert not Tokenizer.available(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not there; without it only token ids"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Tokenizer.available(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)
    for config, wanted in [("[", "not a readable JSON file"), ("[]", "got a JSON list, wanted an object")]:
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {wanted}"):
            Tokenizer.from_folder(tmp_path)
    bad = folder(tmp_path / "bad", train_tokenizer(), tokenizer_config={"chat_template": 3})
    with pytest.raises(CheckpointError, match="chat_template: got int, wanted text"):
        Tokenizer.from_folder(bad)
    (bad / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        Tokenizer.from_folder(bad)
    none = Tokenizer.from_folder(folder(tmp_path / "none", train_tokenizer()))
    assert not none.has_chat_template
    with pytest.raises(CheckpointError, match="no chat template in chat_template.jinja"):
        none.render_chat([])
    broken = Tokenizer.from_folder(folder(tmp_path / "broken", train_tokenizer(), template="\n{% if %}"))
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        broken.render_chat([])


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 2}}, (7,)),
        ({"generation_config": {"eos_token_id": [7, 9, 7]}}, (7, 9)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 2}}, (2,)),
        ({"generation_config": {}, "config": {"eos_token_id": [2, 0]}}, (2, 0)),
        ({"config": {}, "tokenizer_config": {"eos_token": "</s>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": "no such token"}}, ()),
        ({}, ()),
    ],
)
def test_stop_tokens(tmp_path, files, wanted):
    assert stop_token_ids(folder(tmp_path / "t", train_tokenizer(), **files)) == wanted


@pytest.mark.parametrize("value", ["</s>", True, -1, [1, "x"], 2.0])
def test_stop_tokens_that_are_no_ids(tmp_path, value):
    path = folder(tmp_path / "t", generation_config={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: got"):
        stop_token_ids(path)


def test_stop_token_by_name_needs_the_tokenizer(tmp_path):
    assert stop_token_ids(folder(tmp_path / "t", tokenizer_config={"eos_token": "</s>"})) == ()
