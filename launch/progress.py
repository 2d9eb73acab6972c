"""What a person at the terminal sees: a bar for the run, a bar for the rollout in progress, a line per step."""

from __future__ import annotations

import threading
import time

import tqdm

from tlt_jax.rollout.engine import Progress


class SilentReporter:
    """Shows nothing: for all processes of a job but the first."""

    def phase(self, step: int, name: str) -> None:
        pass

    def progress(self, progress: Progress) -> None:
        pass

    def done(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class TerminalReporter:
    """Two tqdm bars: RL steps done, and responses of the current rollout done with live batch and tokens/s."""

    def __init__(self, num_steps: int, num_responses: int, enabled: bool = True):
        self._lock = threading.Lock()
        self._steps = tqdm.tqdm(total=num_steps, desc="steps", unit="step", disable=not enabled, position=0)
        self._rows = tqdm.tqdm(total=num_responses, unit="resp", leave=False, disable=not enabled, position=1)
        self._start = (time.perf_counter(), 0)

    def phase(self, step: int, name: str) -> None:
        with self._lock:
            if not self._steps.n and 1 < step <= self._steps.total:
                self._steps.initial = self._steps.n = step - 1  # a resumed run
            self._rows.set_description(f"step {step} {name}")
            self._rows.n = 0
            self._rows.refresh()
            self._start = (time.perf_counter(), -1)

    def progress(self, progress: Progress) -> None:
        with self._lock:
            start_s, tokens = self._start
            if tokens < 0:
                self._start = (start_s, progress.tokens)
                tokens = progress.tokens
            rate = (progress.tokens - tokens) / max(time.perf_counter() - start_s, 1e-3)
            self._rows.total = progress.done + progress.live + progress.waiting
            self._rows.n = progress.done
            self._rows.set_postfix_str(f"live {progress.live}, waiting {progress.waiting}, {rate:.0f} tok/s")

    def done(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._steps.n = step
            self._steps.refresh()
        shown = (
            f"step {step}/{self._steps.total}  reward {metrics['rl/reward_mean']:.3f}"
            f"  len {metrics['rollout/len_mean']:.0f} (max {metrics['rollout/len_max']:.0f})"
            f"  {metrics['rollout/tokens_per_s']:.0f} tok/s  accept {metrics['spec/accept_len']:.2f}"
            f"  loss {metrics['rl/loss']:.4f}  entropy {metrics['rl/entropy']:.3f}  gap {metrics['rl/logprob_gap']:.1e}"
            f"  {metrics['time/step_s']:.1f} s"
            f" = rollout {metrics['time/rollout_s']:.1f} + reward {metrics['time/reward_s']:.1f}"
            f" + update {metrics['time/update_s'] + metrics['time/logprob_s']:.1f} + rest"
        )
        self.note(shown)

    def note(self, text: str) -> None:
        with self._lock:
            tqdm.tqdm.write(text)

    def close(self) -> None:
        self._rows.close()
        self._steps.close()
