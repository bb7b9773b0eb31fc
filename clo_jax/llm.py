"""`LLM`: what a user holds. Loads a checkpoint, answers prompts, streams, closes."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from clo_jax import checkpoints, memory, models, prompts
from clo_jax.cache import calibration as calibrations
from clo_jax.cache.planner import Planner
from clo_jax.config import ATTENTIONS, Attention, CloConfig
from clo_jax.forced import ForcedSession, forced_attention
from clo_jax.planning import PlanOptions
from clo_jax.policies.attended import Attended
from clo_jax.preparation import Preparation, Settings
from clo_jax.prompts import Options, Prompts, Request
from clo_jax.results import Delta, Generation, Metrics
from clo_jax.rivals import RivalConfig, rival_config
from clo_jax.session import Session
from clo_jax.text import IncrementalDecoder, Tokenizer
from clo_jax.turns import Turns


class LLM:
    """A model ready to answer. Make it with `LLM.load`; use it as a context manager or call `close`.

    Calls from several threads take turns. A call that fails, is interrupted, or whose stream is closed leaves the
    object ready for the next one.
    """

    def __init__(
        self, config, params: Any, info, tokenizer: Tokenizer | None, settings: Settings, max_batch: int,
        chunk_tokens: int,
    ) -> None:  # fmt: skip
        self.config, self.tokenizer, self.attention = config, tokenizer, settings.attention
        self.clo, self.rival = settings.clo, settings.rival
        self.max_context, self.max_batch = settings.max_context, max_batch
        self._info, self._chunk = info, chunk_tokens
        self._preparation = Preparation(config, settings)  # refuses now what does not fit the model
        self._params = models.for_decoding(params)
        self._turns = Turns()

    @classmethod
    def load(
        cls, path, *, attention: Attention = "clo", clo: CloConfig | None = None, rival: RivalConfig | None = None,
        dtype: str = "auto", max_context: int | None = None, max_batch: int = 8, kv_offload: bool = True,
        backend: str = "auto", transfer_threads: int | None = None, chunk_tokens: int = 16, timeout_s: float = 30.0,
        head_scores: Any = None, calibration: str | os.PathLike | None = "auto", planner: Planner = "none",
        kv_budget: int | None = None, adapt: bool = False, pinning: Callable[[int, int], None] | None = None,
    ) -> "LLM":  # fmt: skip
        """Loads a checkpoint that `clo-jax convert` made.

        On a GPU, XLA takes three quarters of the memory when JAX starts. If this is what starts it, and the environment
        does not say how XLA is to take memory, this sets XLA_PYTHON_CLIENT_PREALLOCATE=false: XLA then takes what it
        needs when it does, and the engine's arenas find the rest.

        Args:
          path: checkpoint folder.
          attention: "clo" (most rows in host memory), "full" (all rows on the device, exact), or a policy that CLO is
            compared with: "exact" (true top-k, rows on the device), "infinigen", "pqcache", "retroinfer".
            docs/policies.md has them all.
          clo: settings of the CLO policy; ignored by the others. None: the defaults, with the retriever and number
            of hash bits that the calibration found best, where there is one.
          rival: settings of a policy that CLO is compared with, of the class that belongs to `attention`
            (`clo_jax.InfiniGenConfig` for "infinigen"). None: its defaults.
          dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16"; of parameters, activations and cache.
          max_context: tokens of prompt and answer together; buffers are sized for it. None: the model's limit.
          max_batch: prompts that run at once; more are answered in groups.
          kv_offload: False keeps the rows in device memory with the same selection (for comparison).
          backend: transfer backend, or "auto"; naming one demands it.
          transfer_threads: copying threads; None: as many as pay.
          chunk_tokens: decode steps per dispatched program: the grain of streaming and of Ctrl-C.
          timeout_s: bound on every wait for a transfer.
          head_scores: importance of heads in [0, 1], an array [L, K] or [L, H]; None: the calibration's, or all
            equally important when there is none.
          calibration: "auto" (the folder `calibration` of the checkpoint, where there is one), a folder, or None. Its
            trained projections serve the retriever and number of hash bits that they were made for.
          planner: which KV heads stay on the device: "none" (those of `clo.resident_heads`), "paper" (Eq. 11-13) or
            "cost" (the fastest predicted step). Plans need a calibration with similarity and costs; they are made for
            each batch size and `max_context`.
          kv_budget: bytes of device memory that planner "cost" may fill with the cache; None: most of what is free on
            the device.
          adapt: follow the workload: similarity and hits of the heads are watched, and between requests the plan is
            made anew when enough heads would change places. The metrics say what changed.
          pinning: called with (bytes done, bytes in all) while host rows are pinned for a GPU, at the first prompts of
            a batch size.

        Raises:
          ValueError: a setting that makes no sense.
          CheckpointError: the folder is no readable checkpoint, or the calibration is damaged or of another model.
        """
        if attention not in ATTENTIONS:
            raise ValueError(f"attention: got {attention!r}, wanted {', '.join(ATTENTIONS[:-1])} or {ATTENTIONS[-1]}")
        rival = rival_config(attention, rival)
        if attention != "clo" and planner != "none":
            raise ValueError(f"planner: got {planner!r} with attention {attention}, wanted none: plans are CLO's")
        if rival is not None and not (kv_offload and backend == "auto" and transfer_threads is None):
            raise ValueError(
                f"kv_offload, backend, transfer_threads: got {kv_offload}, {backend!r}, {transfer_threads} with "
                f"attention {attention}, wanted the defaults: it does not use the transfer engine"
            )
        for name, value in (("max_batch", max_batch), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, wanted a positive integer")
        memory.grow_pool_on_demand()
        config, params, info = checkpoints.load_checkpoint(path, dtype=dtype)
        limit = config.max_position_embeddings
        if max_context is None:
            max_context = limit
        if not 2 <= max_context <= limit:
            raise ValueError(f"max_context: got {max_context}, wanted 2 to {limit}, the model's limit")
        tokenizer = Tokenizer.from_folder(info.path) if Tokenizer.available(info.path) else None
        found = calibrations.find(calibration, info.path, info.manifest.source_files, config)
        if clo is None:
            choice = found.choice if found else None
            clo = CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()
        settings = Settings(
            attention, clo, rival, max_context, str(params["embed"]["embedding"].dtype), kv_offload, backend,
            transfer_threads, timeout_s, head_scores, found, PlanOptions(planner, kv_budget, adapt), pinning,
        )  # fmt: skip
        return cls(config, params, info, tokenizer, settings, max_batch, chunk_tokens)

    # --- answering ----------------------------------------

    def generate(
        self, prompts: Prompts, *, max_new_tokens: int | None = None, do_sample: bool = False,
        temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
        seed: int | Sequence[int] = 0, stop_token_ids: int | Sequence[int] = (), ignore_eos: bool = False,
        chat: bool = False, callback: Callable[[Delta], None] | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Answers every prompt.

        Args:
          prompts: one text, texts, one list of token ids, or lists of token ids. Nothing is ever cut.
          max_new_tokens: at most this many tokens each; None: 256, or what the context has room for.
          do_sample: False takes the likeliest token. True draws; then values not given here come from the checkpoint's
            generation_config.json.
          temperature, top_k (0: off), top_p (1: off): of sampling.
          seed: of sampling; one number for every row (each row draws as it would alone) or one per prompt.
          stop_token_ids: additional stop tokens.
          ignore_eos: do not stop at the checkpoint's stop tokens.
          chat: wrap each text in the checkpoint's chat template, as one user message.
          callback: called with a `Delta` for each row that a chunk added to.

        Returns:
          one `Generation` per prompt, in order.

        Raises:
          ValueError: empty or too long prompts, ids outside the vocabulary, settings out of range.
          TransferError, MemoryPlanError: the engine failed; the run does not fit memory.
        """
        options = Options(max_new_tokens, do_sample, temperature, top_k, top_p, seed, stop_token_ids, ignore_eos)
        requests = self._requests(prompts, chat, options)
        answers: list[Generation] = []
        with self._turns.turn():
            for request in requests:
                first = len(answers)
                session, decoders = self._session(request), [self._decoder() for _ in request.prompts]
                for new in session:
                    if callback is not None:
                        for delta in self._deltas(session, decoders, new, first):
                            callback(delta)
                metrics = session.metrics()
                self._preparation.observe(session.head_statistics)
                for row, tokens in enumerate(session.tokens):
                    answers.append(
                        Generation(
                            self._text(tokens, session), list(tokens), session.finish_reason(row) or "abort",
                            len(request.prompts[row]), metrics,
                        )
                    )  # fmt: skip
        return answers

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Delta]:
        """Answers one prompt chunk by chunk; options as in `generate`. Closing the iterator cancels the answer."""
        requests = self._requests(prompt, options.pop("chat", False), Options(**options))
        if len(requests) != 1 or len(requests[0].prompts) != 1:
            raise ValueError("prompt: got several prompts, wanted one (use generate)")
        return self._stream(requests[0])

    def _stream(self, request: Request) -> Iterator[Delta]:
        with self._turns.turn():
            session, decoders = self._session(request), [self._decoder()]
            for new in session:
                yield from self._deltas(session, decoders, new, 0)
            self._preparation.observe(session.head_statistics)

    def forced_logits(self, tokens: Sequence[int], prefix: int) -> Iterator[tuple[np.ndarray, Metrics]]:
        """Logits along a given text: the first `prefix` tokens are prefilled, the others are decoded as given.

        Args:
          tokens: ids of the text. prefix: 1 to len(tokens) - 1.

        Returns:
          An iterator over chunks: logits float32 [n, V], of what is predicted in place of each token after the prefix,
          and the costs so far. The first chunk is of one token, predicted by prefill. Closing it ends the run.

        Raises:
          ValueError: ids outside the vocabulary, a prefix out of range, or a text longer than the context.
        """
        return self._forced_logits(self._forced(tokens, prefix), prefix)

    def _forced(self, tokens: Sequence[int], prefix: int) -> list[int]:
        """A given text, checked."""
        (ids,) = prompts.token_ids([list(tokens)], False, None, self.config.vocab_size, self._info.path)
        if not 1 <= prefix < len(ids):
            raise ValueError(f"prefix: got {prefix}, wanted 1 to {len(ids) - 1}, less than the tokens given")
        if len(ids) > self.max_context:
            raise ValueError(f"tokens: got {len(ids)}, wanted at most max_context = {self.max_context}")
        return ids

    def _forced_logits(self, ids: list[int], prefix: int) -> Iterator[tuple[np.ndarray, Metrics]]:
        with self._turns.turn():
            policy, tables = self._preparation.prepare(1, prefix)
            engine = self._preparation.engine
            session = ForcedSession(self.config, self._params, policy, tables, engine, ids, prefix, self._chunk)
            for logits in session:
                yield logits, session.metrics()

    def forced_attention(self, tokens: Sequence[int], prefix: int) -> Iterator[tuple[Attended, ...]]:
        """What each decode step along a given text attends to, by layer: for measurements, one step a program.

        Arguments and errors as `forced_logits`; also ValueError for InfiniGen with a limited pool.

        Returns:
          An iterator over the decoded tokens, all after the prefix but the last.
        """
        return self._forced_attention(self._forced(tokens, prefix), prefix)

    def _forced_attention(self, ids: list[int], prefix: int) -> Iterator[tuple[Attended, ...]]:
        with self._turns.turn():
            policy, tables = self._preparation.prepare(1, prefix)
            yield from forced_attention(
                self.config, self._params, policy, tables, self._preparation.engine, ids, prefix
            )

    def close(self) -> None:
        """Frees the engine and the parameters. Idempotent."""
        with self._turns.turn(last=True):
            self._preparation.close()
            self._params = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What this object runs with: for results files and reports."""
        return {
            "checkpoint": str(self._info.path),
            "architecture": self.config.architecture,
            "dtype": str(self._params["embed"]["embedding"].dtype),
            "stop_token_ids": list(self._info.stop_token_ids),
        } | self._preparation.describe()

    # --- preparation ----------------------------------------

    def _session(self, request: Request) -> Session:
        policy, tables = self._preparation.prepare(len(request.prompts), max(len(p) for p in request.prompts))
        return Session(self.config, self._params, policy, tables, self._preparation.engine, request, self._chunk)

    def _requests(self, given: Prompts, chat: bool, options: Options) -> list[Request]:
        info, vocab_size = self._info, self.config.vocab_size
        return prompts.requests(
            prompts.token_ids(given, chat, self.tokenizer, vocab_size, info.path), options,
            max_context=self.max_context, max_batch=self.max_batch, model_stop=info.stop_token_ids,
            generation_config=info.generation_config,
        )  # fmt: skip

    # --- text ----------------------------------------

    def _decoder(self) -> IncrementalDecoder | None:
        return None if self.tokenizer is None else IncrementalDecoder(self.tokenizer)

    def _text(self, tokens: list[int], session: Session) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(session.without_stop(tokens))

    def _deltas(self, session: Session, decoders, new: list[list[int]], first_row: int) -> Iterator[Delta]:
        for row, tokens in enumerate(new):
            if not tokens:
                continue
            reason, text = session.finish_reason(row), None
            if decoders[row] is not None:
                text = decoders[row].push(session.without_stop(tokens))
                if reason is not None:
                    text += decoders[row].flush()
            metrics = session.metrics() if reason is not None else None
            yield Delta(first_row + row, text, tokens, reason, metrics)
