"""The table of a comparison: one row an arm."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .judge import Row

MB = 1e6


def peer_rows(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a frame with units in its column names; an arm that failed shows its error, where one did."""
    frame = pd.DataFrame([_shown(row) for row in rows])
    return frame if any(row.error for row in rows) else frame.drop(columns="error", errors="ignore")


def _shown(row: Row) -> dict:
    scaled = {
        "peak RSS, MB": row.peak_rss,
        "allowed, MB": row.rss_allowed,
        "charged to its group, MB": row.group_peak,
        "device MB a token": row.bytes_per_token,
    }
    seconds = None if row.seconds_per_token is None else f"{row.seconds_per_token:.3f} ± {row.seconds_spread:.3f}"
    return {
        "arm": row.arm,
        "role": row.role,
        "n": row.rounds,
        "s a token": seconds,
        "× ours": row.times_ours,
        **{name: None if value is None else value / MB for name, value in scaled.items()},
        "read amplification": row.amplification,
        "device ÷ asked": row.device_per_read,
        "equal tokens": {True: "yes", False: "NO", None: None}[row.equal_tokens],
        "error": row.error,
    }
