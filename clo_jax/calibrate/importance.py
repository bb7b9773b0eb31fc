"""Head importance by DuoAttention's gate optimisation, on the model itself.

Every head gets a gate that fades it from full attention (1) to attention over sink and recent tokens (0). The weights
stay as they are; the gates are pulled towards 0, and held up where the hidden states of answer tokens would drift away
from those of the model itself. A gate's final value, stretched (`stretched`), is the head's importance.

Differences from the original: the distance is relative to the size of the hidden states, so that one sparsity weight
serves every model; what is compared is the state that predicts an answer token rather than the state of that token.
"""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clo_jax.calibrate import gated
from clo_jax.calibrate.passkeys import Example
from clo_jax.config import ModelConfig
from clo_jax.errors import CheckpointError

_RAMP = 0.2  # share of the steps in which the rate rises, and in which it falls again
_RATE_FLOOR = 0.1
_SMALLEST_BUCKET = 256  # prompts are padded, so that those of about one length share their programs
_ANSWER_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class GateSettings:
    """How gates are trained. DuoAttention takes a window of 128 + 256 tokens, long prompts and 2000 steps. A head that
    is reused in CLO has fewer tokens than that for certain (sink and tail), so ours must do with a window that is about
    as small, which also lets short prompts and few steps tell heads apart (docs/decisions.md has both, judged)."""

    per: Literal["kv", "query"] = "kv"  # a gate for each KV head (with all its query heads) or for each query head
    sink: int = 16
    recent: int = 64
    steps: int = 60
    rate: float = 0.08
    sparsity_weight: float = 0.05
    needles: int = 5
    words: int = 8
    lengths: tuple[int, ...] = (504, 760)
    examples: int = 24  # different prompts; more steps go through them again, in another order
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per not in ("kv", "query"):
            raise ValueError(f"per: got {self.per!r}, wanted kv or query")
        for name in ("recent", "steps", "needles", "words", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted a positive integer")
        if self.sink < 0:
            raise ValueError(f"sink: got {self.sink}, wanted an integer >= 0")
        if not self.rate > 0 or not self.sparsity_weight >= 0:
            raise ValueError(
                f"rate, sparsity_weight: got {self.rate}, {self.sparsity_weight}, wanted a positive number and one >= 0"
            )
        if not self.lengths or min(self.lengths) <= self.sink + self.recent:
            raise ValueError(
                f"lengths: got {self.lengths}, wanted prompts longer than sink + recent = {self.sink + self.recent}"
            )

    @property
    def window(self) -> gated.Window:
        return gated.Window(self.sink, self.recent)


class Progress(NamedTuple):
    """What the callback gets after each step."""

    step: int  # steps done
    steps: int
    distance: float  # of this step's prompt
    mean_gate: float


@dataclasses.dataclass(frozen=True)
class Gates:
    """The result: `scores` float32 [L, K] or [L, H] in [0, 1]; distance and mean gate of every step [steps]."""

    scores: np.ndarray
    distances: np.ndarray
    mean_gates: np.ndarray


class _State(NamedTuple):
    gates: jax.Array
    optimiser: Any
    step: int
    distances: list[float]
    mean_gates: list[float]


def optimise_gates(
    config: ModelConfig, params: Any, examples: Sequence[Example], settings: GateSettings, *,
    state_file: pathlib.Path | None = None, save_every: int = 10,
    progress: Callable[[Progress], None] = lambda done: None,
) -> Gates:  # fmt: skip
    """Trains the gates.

    Args:
      config, params: the model; params are only read.
      examples: prompts with answers (`passkeys.passkey_examples`).
      settings: see `GateSettings`; of the prompts' figures only `seed` is read here.
      state_file: where the state is kept every `save_every` steps and when the run is interrupted. A file that is there
        is continued, to the same result as without the interruption. It is left there at the end: whoever writes the
        result removes it.
      progress: called after each step.

    Raises:
      CheckpointError: a state file that cannot be read, or of another model, other prompts or other settings.
      ValueError: no examples.
    """
    if not examples:
        raise ValueError("examples: got none, wanted at least one")
    width = config.num_kv_heads if settings.per == "kv" else config.num_heads
    optimiser = optax.adam(_rate(settings))
    gates = jnp.ones((config.num_layers, width), jnp.float32)
    state = _State(gates, optimiser.init(gates), 0, [], [])
    fingerprint = _fingerprint(config, examples, settings)
    if state_file is not None and state_file.exists():
        state = _read(state_file, state, fingerprint)
    update = jax.jit(lambda grads, state, gates: _update(optimiser, grads, state, gates))
    wanted: dict[int, np.ndarray] = {}  # the model's own hidden states, by example; kept on the host
    try:
        while state.step < settings.steps:
            index = _example_of(state.step, len(examples), settings.seed)
            if index not in wanted:
                wanted[index] = np.asarray(own_states(config, params, examples[index], settings.window))
            distance, grads = distance_gradient(
                config, params, state.gates, examples[index], jnp.asarray(wanted[index]), settings.window
            )
            gates, inner = update(grads + settings.sparsity_weight / gates.size, state.optimiser, state.gates)
            mean = float(jnp.mean(gates))
            state = _State(
                gates, inner, state.step + 1, [*state.distances, float(distance)], [*state.mean_gates, mean]
            )  # fmt: skip
            if state_file is not None and state.step % save_every == 0:
                _write(state_file, state, fingerprint)
            progress(Progress(state.step, settings.steps, float(distance), mean))
    finally:
        if state_file is not None and state.step:
            _write(state_file, state, fingerprint)
    return Gates(np.asarray(state.gates), np.asarray(state.distances), np.asarray(state.mean_gates))


def stretched(gates: np.ndarray) -> tuple[np.ndarray, float]:
    """Gates as importance: times the factor that brings the mean of their upper half to 1, clipped; and that factor.

    How high gates end depends on the model and on the weight of the sparsity term, whereas the thresholds read them as
    an absolute measure (s³, Eq. 8) that was chosen for DuoAttention's published scores. The upper half of those has a
    mean of 0.99: on them this changes next to nothing. Gates that are all 0 stay as they are.
    """
    upper = np.sort(gates, axis=None)[gates.size // 2 :].mean()
    factor = float(1 / upper) if upper > 0 else 1.0
    return np.minimum(gates * np.float32(factor), np.float32(1)), factor


def own_states(config: ModelConfig, params: Any, example: Example, window: gated.Window) -> jax.Array:
    """Hidden states of the unchanged model that predict the answers: float32 [A, hidden], A padded."""
    x, lengths = padded(config, params, example)
    for index in range(config.num_layers):
        x = gated.layer_jitted(config, window, params["layers"][index], None, x, lengths)
    return gated.answers_jitted(config, params, x, answer_tokens(example)[0])


def distance_gradient(
    config: ModelConfig, params: Any, gates: jax.Array, example: Example, wanted: jax.Array, window: gated.Window
) -> tuple[jax.Array, jax.Array]:
    """The distance of the gated model's answers from `wanted` (`own_states`), and its gradient with respect to the
    gates [L, K] or [L, H]."""
    x, lengths = padded(config, params, example)
    inputs = []
    for index in range(config.num_layers):
        inputs.append(x)
        x = gated.layer_jitted(config, window, params["layers"][index], gates[index], x, lengths)
    where, weight = answer_tokens(example)
    distance, grad = gated.distance_jitted(config, params, x, where, weight, wanted)
    of_gates: list[jax.Array] = []
    for index in reversed(range(config.num_layers)):
        of_gate, grad = gated.layer_gradient_jitted(
            config, window, params["layers"][index], gates[index], inputs.pop(), lengths, grad
        )  # fmt: skip
        of_gates.append(of_gate)
    return distance, jnp.stack(of_gates[::-1])


def padded(config: ModelConfig, params: Any, example: Example) -> tuple[jax.Array, jax.Array]:
    """Embeddings of the prompt, padded to its bucket [1, N, hidden], and its length [1]."""
    length = len(example.tokens)
    step = max(_SMALLEST_BUCKET, (1 << (length - 1).bit_length()) // 16)  # a sixteenth of padding at most
    tokens = np.zeros((1, -(-length // step) * step), np.int32)
    tokens[0, :length] = example.tokens
    return gated.embed_jitted(config, params, jnp.asarray(tokens)), jnp.asarray([length], jnp.int32)


def answer_tokens(example: Example) -> tuple[jax.Array, jax.Array]:
    """Answer tokens, padded: indices int32 [A], weights float32 [A]."""
    (found,) = np.nonzero(example.answer)
    size = -(-len(found) // _ANSWER_BUCKET) * _ANSWER_BUCKET
    where, weight = np.zeros(size, np.int32), np.zeros(size, np.float32)
    where[: len(found)], weight[: len(found)] = found, 1
    return jnp.asarray(where), jnp.asarray(weight)


def _rate(settings: GateSettings) -> optax.Schedule:
    ramp, floor = max(1, int(_RAMP * settings.steps)), _RATE_FLOOR * settings.rate
    return optax.join_schedules(
        [
            optax.linear_schedule(floor, settings.rate, ramp),
            optax.constant_schedule(settings.rate),
            optax.linear_schedule(settings.rate, floor, ramp),
        ],
        [ramp, max(ramp, settings.steps - ramp)],
    )


def _update(optimiser, grads, state, gates):
    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32 and takes powers of them
        updates, state = optimiser.update(grads, state, gates)
    return jnp.clip(optax.apply_updates(gates, updates), 0.0, 1.0), state


def _example_of(step: int, number: int, seed: int) -> int:
    """Every example once an epoch, in an order of the epoch's own: a function of the step, so that a continued run sees
    what an uninterrupted one sees."""
    order = np.random.default_rng([seed, step // number]).permutation(number)
    return int(order[step % number])


# --- the kept state ----------------------------------------


def _fingerprint(config: ModelConfig, examples: Sequence[Example], settings: GateSettings) -> str:
    digest = hashlib.sha256(repr((config, settings)).encode())
    for example in examples:
        digest.update(example.tokens.tobytes() + example.answer.tobytes())
    return digest.hexdigest()


def _write(path: pathlib.Path, state: _State, fingerprint: str) -> None:
    leaves = {f"optimiser{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.optimiser))}
    facts = {"fingerprint": fingerprint, "step": state.step}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.savez(
            file, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), gates=np.asarray(state.gates),
            distances=np.asarray(state.distances), mean_gates=np.asarray(state.mean_gates), **leaves,
        )  # fmt: skip
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(path: pathlib.Path, fresh: _State, fingerprint: str) -> _State:
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            facts = json.loads(file["facts"].tobytes())
            leaves, structure = jax.tree.flatten(fresh.optimiser)
            kept = [jnp.asarray(file[f"optimiser{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
            state = _State(
                jnp.asarray(file["gates"]), jax.tree.unflatten(structure, kept), int(facts["step"]),
                file["distances"].tolist(), file["mean_gates"].tolist(),
            )  # fmt: skip
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: no readable state of a gate optimisation ({error}); remove it") from None
    if facts["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path}: of another model, other prompts or other settings; remove it, or give the settings that it was "
            "begun with"
        )
    return state
