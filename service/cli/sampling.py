"""The flags that say how tokens are chosen, shared by the commands that generate."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from service.cli.flags import flag

if TYPE_CHECKING:
    from protos.slipstream.v1.sampling_pb2 import SamplingParams

_GROUP = "Sampling (left out: the model's own default)"


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Each is a field of the protocol's SamplingParams, under the same name; None leaves it out."""

    max_tokens: int | None = flag("Most tokens to generate.", group=_GROUP)
    temperature: float | None = flag("0: always the most likely token.", group=_GROUP)
    top_p: float | None = flag("Keep the likeliest tokens that add up to this.", group=_GROUP)
    top_k: int | None = flag("Keep this many of the likeliest tokens.", group=_GROUP)
    min_p: float | None = flag("Keep tokens this likely, relative to the likeliest.", group=_GROUP)
    seed: int | None = flag("Makes the answer repeatable.", group=_GROUP)
    repetition_penalty: float | None = flag("Above 1 avoids tokens seen before.", group=_GROUP)
    stop: list[str] | None = flag("End at this text. May be given several times.", group=_GROUP)
    ignore_eos: bool | None = flag(
        "Go on past the model's own end of text.", group=_GROUP, names=("--ignore-eos",)
    )

    def to_proto(self) -> SamplingParams:
        from protos.slipstream.v1.sampling_pb2 import SamplingParams

        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
