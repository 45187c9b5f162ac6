"""One arm, one prompt, one process. `stage` starts them; a request that it wrote can be run again by hand:

    python -m moelab.lab.peers.worker REQUEST.json

Bytes and times are stamped as each token arrives, so decode is what lies between the first token and the last;
loading and the prompt's pass are outside it. An error is not caught: the caller shows its last lines.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ...commands import Parser
from ...disk import device_bytes
from ...files import digest_json, write_bytes
from .arms import ARMS, Request
from .cold import peak_rss


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker saw. Seconds are from its first line; bytes are what the device has delivered by then."""

    options: dict
    options_digest: str
    tokens: list[int]
    seconds: list[float]
    """When each token was ready."""
    device: list[int | None]
    """Device bytes when each token was ready; None where nobody counts."""
    read: list[int | None]
    """Bytes that the arm says it had read by then; None where it does not say."""
    loaded_seconds: float
    peak_rss: int | None
    report: dict

    @property
    def decoded(self) -> int:
        return len(self.tokens) - 1

    @property
    def seconds_per_token(self) -> float:
        return (self.seconds[-1] - self.seconds[0]) / self.decoded

    @property
    def decode_bytes(self) -> int | None:
        return None if None in self.device else self.device[-1] - self.device[0]

    @property
    def read_bytes(self) -> int | None:
        return None if None in self.read else self.read[-1] - self.read[0]


def run(request: Request) -> Answer:
    """Run an arm in this process."""
    began = time.perf_counter()
    running = ARMS[request.arm](request)
    loaded = time.perf_counter() - began
    tokens, seconds, device, read = [], [], [], []
    for token in running.tokens:
        seconds.append(time.perf_counter() - began)
        device.append(device_bytes())
        read.append(running.read())
        tokens.append(token)
    peak = peak_rss()  # before the report, which may compute
    return Answer(
        options=running.options,
        options_digest=digest_json(running.options),
        tokens=tokens,
        seconds=seconds,
        device=device,
        read=read,
        loaded_seconds=loaded,
        peak_rss=peak,
        report=running.report(),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m moelab.lab.peers.worker", description=__doc__)
    parser.add_argument("request", metavar="REQUEST", help="JSON file of a `Request`; it names where the result goes")
    path = parser.parse_args(arguments).request
    request = msgspec.json.decode(Path(path).read_bytes(), type=Request)
    write_bytes(request.result, msgspec.json.encode(run(request)))


if __name__ == "__main__":
    main()
