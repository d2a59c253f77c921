"""StageLabels: labels of a stage's MoE layers, found in routes that count the model's layers another way."""

from __future__ import annotations

from collections.abc import Iterable

from npu_replay.errors import RouterError


class StageLabels(tuple[int, ...]):
    """Labels of MoE layers, with those of the whole model and of the rank; no `whole`: routes have no others.

    >>> from npu_replay.routes.labels import StageLabels
    >>> StageLabels([3], whole=[1, 3]).among((0, 1))
    (1,)
    """

    whole: tuple[int, ...]
    here: tuple[int, ...]

    def __new__(
        cls, labels: Iterable[int], whole: Iterable[int] = (), here: Iterable[int] = ()
    ) -> StageLabels:
        made = super().__new__(cls, labels)
        made.whole, made.here = tuple(whole), tuple(here)
        return made

    def among(self, layers: tuple[int, ...], where: str = "") -> tuple[int, ...]:
        """Return what these layers are called in routes with the labels `layers`.

        In routes of this rank they have their own names. Of others the k-th is the model's k-th MoE layer.
        """
        if not self.whole or layers in (self, self.here):
            return self
        RouterError.unless(
            len(layers) == len(self.whole),
            "the routes have other MoE layers than the pattern of the model",
            f"{len(self.whole)} MoE layers, one for each E, labelled {self.whole} here, or this rank's part",
            f"{len(layers)} MoE layers, {layers}",
            "another model's Hugging Face config, columns of dense layers, or another rank's part",
            where,
        )
        return tuple(layers[self.whole.index(label)] for label in self)
