"""The flags that say how tokens are chosen, shared by the commands that generate."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from service.cli.flags import Flag

if TYPE_CHECKING:
    from protos.slipstream.v1.sampling_pb2 import SamplingParams

_GROUP = "Sampling (left out: the model's own default)"


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Each is a field of the protocol's SamplingParams, under the same name; None leaves it out."""

    max_tokens: Annotated[int | None, Flag("Most tokens to generate.", _GROUP)] = None
    temperature: Annotated[float | None, Flag("0: always the most likely token.", _GROUP)] = None
    top_p: Annotated[float | None, Flag("Keep the likeliest tokens that add up to this.", _GROUP)] = None
    top_k: Annotated[int | None, Flag("Keep this many of the likeliest tokens.", _GROUP)] = None
    min_p: Annotated[float | None, Flag("Keep tokens this likely, relative to the likeliest.", _GROUP)] = None
    seed: Annotated[int | None, Flag("Makes the answer repeatable.", _GROUP)] = None
    repetition_penalty: Annotated[float | None, Flag("Above 1 avoids tokens seen before.", _GROUP)] = None
    stop: Annotated[list[str] | None, Flag("End at this text. May be given several times.", _GROUP)] = None
    ignore_eos: Annotated[
        bool | None, Flag("Go on past the model's own end of text.", _GROUP, names=("--ignore-eos",))
    ] = None

    def to_proto(self) -> SamplingParams:
        from protos.slipstream.v1.sampling_pb2 import SamplingParams

        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
