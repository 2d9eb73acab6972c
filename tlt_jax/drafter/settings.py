"""The `drafter` section of a run: which drafter, trained how, on what, starting from where."""

from __future__ import annotations

import dataclasses

from tlt_jax.drafter.buffer import BufferConfig
from tlt_jax.drafter.config import DraftConfig, LossConfig, loss_preset
from tlt_jax.drafter.packing import BatchConfig
from tlt_jax.drafter.train import DraftOptimConfig
from tlt_jax.drafter.warmup import WarmupConfig
from tlt_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A run's drafter.

    Attributes:
      enabled: whether rollouts draft with a model, and idle workers train it.
      path: drafter to start from: a workdir of `launch.train_drafter`, or a directory in EAGLE or EAGLE-3 layout. Form
        and vocabulary are then those found there. Empty starts from random weights.
      form: "eagle" or "eagle3".
      feature_layers: eagle3: see `DraftConfig`.
      draft_vocab_size: ids that the drafter can propose, 0 for all. Which ones follows from data, so only
        `launch.train_drafter` can choose them; a run takes the map that lies at `path`.
      preset: of the loss, whose values are the defaults of `loss`.
      loss: changes to the preset. Its temperature defaults to that of the rollouts.
      optim: of training inside a run.
      batch: of an optimizer step.
      buffer: what a run keeps to train on.
      warmup: of `launch.train_drafter`.
      seed: of initialisation and of the order of data.
    """

    enabled: bool = False
    path: str = ""
    form: str = "eagle"
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    preset: str = "coupled"
    loss: LossConfig = None  # type: ignore[assignment]  # filled in below
    optim: DraftOptimConfig = dataclasses.field(default_factory=DraftOptimConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    buffer: BufferConfig = dataclasses.field(default_factory=BufferConfig)
    warmup: WarmupConfig = dataclasses.field(default_factory=WarmupConfig)
    seed: int = 0

    def __post_init__(self):
        if self.draft_vocab_size < 0 or self.seed < 0:
            raise ValueError(
                f"drafter: got draft_vocab_size {self.draft_vocab_size} and seed {self.seed}, expected both >= 0"
            )
        if self.loss is None:
            object.__setattr__(self, "loss", loss_preset(self.preset))
        if self.form == "eagle3" and self.loss.feature_weight:
            raise ValueError(
                f"drafter.loss.feature_weight: got {self.loss.feature_weight} with form eagle3, expected 0: its "
                "features are not what it predicts; set it, or take preset 'eagle3'"
            )

    def draft_config(self, target: ModelConfig) -> DraftConfig:
        """The drafter's shape for `target`, where nothing lies at `path`.

        Raises:
          ValueError: settings that do not fit the target.
        """
        return DraftConfig(
            target=target,
            form=self.form,
            feature_layers=self.feature_layers,
            draft_vocab_size=self.draft_vocab_size,
        )
