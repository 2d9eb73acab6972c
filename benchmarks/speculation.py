"""`launch.bench spec`, `bandit`, `executables`: the engine with drafters against the engine without, on a real task.

All engines of a row get the same requests, each prompt several times, and refilling keeps them at the row's live batch.
Repeats go round all engines in turn, so that a busy moment of the machine meets each of them; figures are medians.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import lossless, machine
from launch import setup
from launch.run_config import RunConfig
from tlt_jax.bandit.factory import make_policy
from tlt_jax.bandit.strategies import ArmTable
from tlt_jax.rl.experience import make_requests
from tlt_jax.rollout.config import REJECTION, RULES
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.speculate import shape_of
from tlt_jax.sharding import Versioned
from tlt_jax.strategy import LAYER_DRAFTER, PLAIN, TREE_KIND, Outcome, Policy, Strategy
from tlt_jax.types import Completion, Params, Request

ADAPTIVE = "adaptive"
POLICIES = (ADAPTIVE, "model", "beg_mab")


class Call(NamedTuple):
    """What one device call gave."""

    live: int
    tokens: int
    seconds: float


def _recording(policy: Policy, calls: list[Call]) -> Policy:
    """The same policy, which also notes down what it is told."""

    def update(state: Any, outcome: Outcome) -> Any:
        calls.append(Call(outcome.situation.live_batch, int(outcome.committed.sum()), outcome.elapsed_s))
        return policy.update(state, outcome)

    return policy._replace(update=update)


@dataclasses.dataclass(kw_only=True)
class Contestant:
    """One engine and what it has shown."""

    engine: RolloutEngine
    calls: list[Call]
    walls_s: list[float] = dataclasses.field(default_factory=list)
    completions: list[Completion] = dataclasses.field(default_factory=list)

    compile_s: float = 0.0  # inside timed rollouts, and taken off them

    def run(self, requests: Sequence[Request], is_timed: bool) -> None:
        start_s, before_s = time.perf_counter(), self.engine.pool.stats.compile_s
        self.completions = self.engine.generate(requests)
        wall_s, compile_s = time.perf_counter() - start_s, self.engine.pool.stats.compile_s - before_s
        if is_timed:
            self.walls_s.append(wall_s - compile_s)
            self.compile_s += compile_s

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tok_s(self) -> float:
        return self.num_tokens / statistics.median(self.walls_s)

    @property
    def accept_len(self) -> float:
        return self.num_tokens / sum(c.rounds for c in self.completions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A run's model, drafter and task, ready to make engines of."""

    run: RunConfig
    inputs: setup.Inputs
    params: Params
    requests: Callable[[int], list[Request]]  # so many of them

    def contestant(self, live: int, arms: str, pool: ExecutablePool | None, **bandit: Any) -> Contestant:
        """An engine at most `live` rows wide; without arms the plain one, which keeps no features either.

        `bandit` changes fields of the run's bandit.
        """
        run, drafting = self.run, self.inputs.drafting if arms else None
        calls: list[Call] = []
        engine = RolloutEngine(
            self.inputs.model,
            dataclasses.replace(run.rollout, max_live=live),
            seed=run.loop.seed,
            pool=pool,
            drafter=None if drafting is None else drafting.model,
            bandit=_recording(make_policy(dataclasses.replace(run.bandit, arms=arms, **bandit), "cpu"), calls)
            if arms
            else None,
            ngram=run.ngram,
        )
        engine.load(Versioned(self.params, 0))
        if drafting is not None:
            drafting.load_into_engine(engine)
        return Contestant(engine=engine, calls=calls)


def prepare(run: RunConfig) -> Bench:
    """Reads model, drafter and the task's held-out prompts."""
    inputs = setup.read_inputs(run)
    task = setup.load_task(run, inputs)
    _, params = setup.load_hf(inputs.model_dir, param_dtype=run.model.dtype)
    prompts = task.eval_prompts()

    def requests(num: int) -> list[Request]:
        group_size = min(8, num)
        num_prompts = -(-num // group_size)
        if num_prompts > len(prompts):
            raise ValueError(f"task: got {len(prompts)} held-out prompts, expected {num_prompts}; raise task.eval_size")
        return make_requests(prompts[:num_prompts], group_size, run.sampling, 1 << 40)

    return Bench(run=run, inputs=inputs, params=params, requests=requests)


def spec(run: RunConfig, batches: Sequence[int], repeats: int, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """Plain against speculative decoding at several live batches.

    Args:
      run: model, task, drafter and bandit.
      batches: live batches.
      repeats: timed rollouts of each engine.
      strategies: fixed ones to show beside the adaptive choice; those of a drafter need one.
    """
    bench = prepare(run)
    rows, same, total = [], 0, 0
    for live in batches:
        contestants = _contestants(bench, live, strategies)
        requests = bench.requests(max(16, 2 * live))
        _race(contestants, requests, repeats)
        plain = contestants["plain"]
        row = {"batch": live, "plain_tok_s": plain.tok_s, "num_tokens": plain.num_tokens, "fixed": {}}
        for name, c in contestants.items():
            if name == "plain":
                continue
            pairs = list(zip(plain.completions, c.completions, strict=True))
            same += sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in pairs)
            total += len(pairs)
            shown = {"tok_s": c.tok_s, "speedup": c.tok_s / plain.tok_s, "accept_len": c.accept_len}
            if name == ADAPTIVE:
                row["compile_s_taken_off"] = c.compile_s
                row |= {"spec_tok_s": c.tok_s, "speedup": shown["speedup"], "accept_len": c.accept_len}
                row |= {"strategy": ADAPTIVE, "arm_rounds": c.engine.stats.arm_rounds}
            else:
                row["fixed"][name] = shown
        rows.append(row)
    return {
        "rows": rows,
        "identical_frac": same / max(total, 1),
        "temperature": run.sampling.temperature,
        "drafter": run.drafter.path.rsplit("/", 1)[-1] if run.drafter.enabled else "",
        "machine": machine.describe(),
    }


def bandit(run: RunConfig, live: int, repeats: int, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """The live choice, by both policies, against each fixed strategy over whole rollouts whose batch shrinks to one.

    Returns:
      `tok_s` by name, `regret_frac`: how much longer the configured policy decodes than the best fixed strategy of each
      phase would, a phase being the live batches that share a bucket of arms; and that of the other policy.
    """
    bench = prepare(run)
    contestants = _contestants(bench, live, strategies)
    other = "beg_mab" if run.bandit.policy == "model" else "model"
    table, pool = run.bandit.table("cpu"), contestants[ADAPTIVE].engine.pool
    contestants[other] = bench.contestant(live, table.text, pool, policy=other)
    requests = bench.requests(live)
    _race(contestants, requests, repeats)
    fixed = [c for name, c in contestants.items() if name not in ("plain", ADAPTIVE, other)]
    fixed.append(bench.contestant(live, "1: plain", pool))
    for _ in range(repeats):
        fixed[-1].run(requests, is_timed=True)
    return {
        "tok_s": {name: c.tok_s for name, c in contestants.items()},
        "regret_frac": _regret(contestants[ADAPTIVE], fixed, table),
        "regret_frac_other": _regret(contestants[other], fixed, table),
        "policy": run.bandit.policy,
        "arm_rounds": {name: contestants[name].engine.stats.arm_rounds for name in (ADAPTIVE, other)},
        "live": live,
        "machine": machine.describe(),
    }


def _regret(adaptive: Contestant, fixed: Sequence[Contestant], table: ArmTable) -> float:
    """How much longer the adaptive choice decodes than playing the best of `fixed` in each phase would."""
    best_s = 0.0
    for phase in range(len(table.thresholds)):
        rates = []
        for c in fixed:
            calls = [call for call in c.calls if table.bucket(call.live) == phase]
            if calls:
                rates.append(sum(call.seconds for call in calls) / sum(call.tokens for call in calls))
        tokens = sum(call.tokens for call in adaptive.calls if table.bucket(call.live) == phase)
        best_s += tokens * min(rates, default=0.0)
    return sum(call.seconds for call in adaptive.calls) / best_s - 1.0


def _contestants(bench: Bench, live: int, strategies: Sequence[Strategy]) -> dict[str, Contestant]:
    pool = ExecutablePool(bench.run.rollout.max_programs)
    found = {"plain": bench.contestant(live, "", None)}
    found[ADAPTIVE] = bench.contestant(live, bench.run.bandit.table("cpu").text, pool)
    for s in strategies:
        if s != PLAIN and (s.drafter != LAYER_DRAFTER or bench.inputs.drafting is not None):
            found[s.name] = bench.contestant(live, f"1: {s.name}", ExecutablePool())
    return found


def _race(contestants: dict[str, Contestant], requests: Sequence[Request], repeats: int) -> None:
    for name, c in contestants.items():
        for _ in range(1 if name not in POLICIES else 2):  # to compile, and for a policy to learn
            c.run(requests, is_timed=False)
    for _ in range(repeats):
        for c in contestants.values():
            c.run(requests, is_timed=True)


def accept(
    run: RunConfig, temperatures: Sequence[float], strategies: Sequence[Strategy], num_requests: int
) -> dict[str, Any]:
    """Tokens committed per round by rule, with one drafter on the same requests.

    "coupled" and "target_only" commit the same tokens, so they meet the same states; "rejection", for chains, has
    tokens of its own from the same law.

    Raises:
      ValueError: no drafter.
    """
    if not run.drafter.enabled:
        raise ValueError("bench accept: got no drafter, expected one; set config.drafter.enabled=true and drafter.path")
    bench = prepare(run)
    pools = {rule: ExecutablePool(run.rollout.max_programs) for rule in RULES}
    rows = []
    for temperature, strategy, rule in itertools.product(temperatures, strategies, RULES):
        if rule == REJECTION and strategy.kind == TREE_KIND:
            continue
        rollout = dataclasses.replace(run.rollout, verify=rule)
        engine = dataclasses.replace(bench, run=dataclasses.replace(run, rollout=rollout))
        c = engine.contestant(rollout.batch_buckets[-1], f"1: {strategy.name}", pools[rule])
        requests = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=temperature))
            for r in bench.requests(num_requests)
        ]
        c.run(requests, is_timed=False)
        shown = {"temperature": temperature, "strategy": strategy.name, "verify": rule}
        rows.append(shown | {"accept_len": c.accept_len, "num_tokens": c.num_tokens})
    return {"rows": rows, "drafter": run.drafter.path.rsplit("/", 1)[-1], "machine": machine.describe()}


def executables(run: RunConfig) -> dict[str, Any]:
    """Compiled bytes of the pool against one pair of programs per (batch bucket, strategy).

    The pool holds, at every batch bucket, what the arms of that batch need, and one verification per width. The naive
    pool holds, at every batch bucket, drafting and verification of every strategy by themselves. Every program counted
    is compiled; where two strategies of the naive pool would have equal verifications, one stands for both.

    Returns:
      `naive_bytes, pool_bytes, ratio, num_naive, num_pool, compiles_after_warmup`, `warmup_s` and `compile_s` of it.
    """
    bench = prepare(run)
    pool, table = ExecutablePool(4096), run.bandit.table("cpu")
    live = run.rollout.batch_buckets[-1]
    ours = bench.contestant(live, table.text, pool)
    start_s = time.perf_counter()
    ours.engine.warm_up()
    warmup_s, compile_s, num_pool = time.perf_counter() - start_s, pool.stats.compile_s, len(pool)
    kept = {key: size for key, size in pool.bytes_by_key().items() if key[0] in _ROUND_PROGRAMS}
    ours.run(bench.requests(live), is_timed=True)
    compiles_after = pool.stats.num_compiled - num_pool
    naive = bench.contestant(live, "1: " + ", ".join(s.name for s in table.strategies), pool)
    naive.engine.warm_up()
    every = {key: size for key, size in pool.bytes_by_key().items() if key[0] in _ROUND_PROGRAMS}
    sizes = [_naive_sizes(every, s) for s in table.strategies]
    naive_bytes, pool_bytes = sum(map(sum, sizes)), sum(kept.values())
    return {
        "naive_bytes": naive_bytes,
        "pool_bytes": pool_bytes,
        "ratio": naive_bytes / pool_bytes,
        "num_naive": sum(map(len, sizes)),
        "num_pool": len(kept),
        "num_pool_with_prefill": num_pool,
        "compiles_after_warmup": compiles_after,
        "warmup_s": warmup_s,
        "compile_s": compile_s,
        "strategies": [s.name for s in table.strategies],
        "batch_buckets": list(run.rollout.batch_buckets),
        "machine": machine.describe(),
    }


_ROUND_PROGRAMS = ("decode", "draft", "verify")


def _naive_sizes(every: dict[tuple, int], strategy: Strategy) -> list[int]:
    """Bytes of a strategy's own programs at every batch and cache bucket."""
    if strategy == PLAIN:
        return [size for key, size in every.items() if key[0] == "decode"]
    shape = shape_of(strategy)
    sizes = [size for key, size in every.items() if key[0] == "verify" and key[3] == shape.width]
    if strategy.drafter == LAYER_DRAFTER:
        sizes += [size for key, size in every.items() if key[0] == "draft" and key[3] == shape]
    return sizes


def lossless_check(run: RunConfig, num_tokens: int, temperatures: Sequence[float]) -> dict[str, Any]:
    """Plain and speculative tokens of the same requests, at least `num_tokens` of them, at several temperatures.

    The speculative engine changes its strategy with every call, through all those that the arms name.
    """
    bench = prepare(run)
    pool = ExecutablePool(run.rollout.max_programs)
    live, table = run.rollout.batch_buckets[-1], run.bandit.table("cpu")
    plain = bench.contestant(live, "", None)
    every = f"1: {', '.join(s.name for s in table.strategies)}"
    other = bench.contestant(live, every, pool, policy="beg_mab", epsilon=1.0)  # a random arm every time
    num_done, differences, per_temperature = 0, [], {}
    for i, temperature in enumerate(temperatures):
        num_here = 0
        for batch in itertools.count():
            requests = [_warmer(r, temperature, (i << 20) + (batch << 12)) for r in bench.requests(4 * live)]
            plain.run(requests, is_timed=False)
            other.run(requests, is_timed=False)
            differences += lossless.compare(
                plain.completions, other.completions, requests, bench.inputs.model, bench.params, run.loop.seed
            )
            num_here += plain.num_tokens
            if num_here * len(temperatures) >= num_tokens:
                break
        per_temperature[str(temperature)] = num_here
        num_done += num_here
    return {
        **lossless.summary(num_done, differences),
        "tokens_by_temperature": per_temperature,
        "arm_rounds": other.engine.stats.arm_rounds,
        "accept_len": other.accept_len,
        "machine": machine.describe(),
    }


def _warmer(request: Request, temperature: float, offset: int) -> Request:
    sampling = dataclasses.replace(request.sampling, temperature=temperature, ignore_eos=True)
    return dataclasses.replace(request, request_id=request.request_id + offset, sampling=sampling)
