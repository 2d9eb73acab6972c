"""Settings of the rollout engine."""

from __future__ import annotations

import dataclasses

# How drafts are accepted; the first keeps the tokens of plain decoding, all keep its law.
COUPLED, TARGET_ONLY, REJECTION = "coupled", "target_only", "rejection"
RULES = (COUPLED, TARGET_ONLY, REJECTION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Shapes and scheduling of one worker's engine.

    Attributes:
      max_live: most responses decoded at once; rounded up to a power of two.
      max_len: most tokens of prompt and response together.
      min_kv: smallest cache bucket; buckets double (or grow by `kv_growth`) up to `max_len`.
      kv_growth: ratio of neighbouring cache buckets, 1.5 or 2.0 say. Smaller wastes less attention and compiles more.
      prefill_rows: most prompts prefilled together.
      prefill_chunk: most prompt tokens per row and prefill call.
      rounds_per_dispatch: most decoding rounds per device call; the host acts between calls.
      rounds_per_draft: most rounds per call while a drafter is at work; each may commit several tokens.
      verify: rule by which drafts are accepted (`RULES`). "coupled" gives the tokens of plain decoding;
        the others give their law, and are here to compare with.
      refill_frac: while requests wait, a call ends once this share of the batch has finished.
      cache_dtype: dtype of the key/value cache; "" takes the model's compute dtype.
      max_programs: bound on compiled programs kept.
    """

    max_live: int = 16
    max_len: int = 2048
    min_kv: int = 128
    kv_growth: float = 2.0
    prefill_rows: int = 8
    prefill_chunk: int = 512
    rounds_per_dispatch: int = 16
    rounds_per_draft: int = 4
    verify: str = "coupled"
    refill_frac: float = 0.125
    cache_dtype: str = ""
    max_programs: int = 512

    def __post_init__(self):
        checks = (
            ("max_live", self.max_live >= 1, ">= 1"),
            ("max_len", self.max_len >= 2, ">= 2"),
            ("min_kv", self.min_kv >= 1, ">= 1"),
            ("kv_growth", self.kv_growth > 1.0, "> 1"),
            ("prefill_rows", self.prefill_rows >= 1, ">= 1"),
            ("prefill_chunk", self.prefill_chunk >= 1, ">= 1"),
            ("rounds_per_dispatch", self.rounds_per_dispatch >= 1, ">= 1"),
            ("rounds_per_draft", self.rounds_per_draft >= 1, ">= 1"),
            ("verify", self.verify in RULES, f"one of {', '.join(RULES)}"),
            ("refill_frac", 0.0 <= self.refill_frac <= 1.0, "in [0, 1]"),
            ("max_programs", self.max_programs >= 1, ">= 1"),
            ("cache_dtype", self.cache_dtype in ("", "float32", "bfloat16"), "'', 'float32' or 'bfloat16'"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"rollout.{name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        return powers_of_two(self.max_live)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        return powers_of_two(self.prefill_rows)

    @property
    def kv_buckets(self) -> tuple[int, ...]:
        """Cache capacities without scratch."""
        return self.kv_buckets_with(0)

    def kv_buckets_with(self, scratch: int) -> tuple[int, ...]:
        """Cache capacities, multiples of 64 up to `max_len` + `scratch` rounded up.

        Args:
          scratch: slots that a round of the widest strategy uses past a row's length.
        """
        top = -(-(self.max_len + scratch) // 64) * 64
        sizes, size = [], float(self.min_kv)
        while size < top:
            sizes.append(min(-(-int(size) // 64) * 64, top))
            size *= self.kv_growth
        return tuple(sorted({*sizes, top}))


def powers_of_two(top: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the first that is at least `top`."""
    sizes = [1]
    while sizes[-1] < top:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)
