"""How long to wait for an acknowledgement: smoothed latency and its variation, as TCP does it (RFC 6298)."""

from __future__ import annotations

from dataclasses import dataclass

_GAIN = 1 / 8
_VARIATION_GAIN = 1 / 4
_VARIATIONS = 8


@dataclass(frozen=True, slots=True)
class AcknowledgementTiming:
    """Latency seen so far, in seconds; `latency_s` is negative before the first acknowledgement."""

    latency_s: float = -1.0
    variation_s: float = 0.0

    def after(self, sample_s: float) -> AcknowledgementTiming:
        """The timing after one more latency was seen."""
        if self.latency_s < 0:
            return AcknowledgementTiming(sample_s, sample_s / 2)
        off_s = abs(self.latency_s - sample_s)
        return AcknowledgementTiming(
            self.latency_s + _GAIN * (sample_s - self.latency_s),
            self.variation_s + _VARIATION_GAIN * (off_s - self.variation_s),
        )

    def deadline_s(self, minimum_s: float, maximum_s: float) -> float:
        """How long nothing may be acknowledged before the link counts as failed."""
        return min(maximum_s, max(minimum_s, self.latency_s + _VARIATIONS * self.variation_s))
