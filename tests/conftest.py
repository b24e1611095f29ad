"""Hypothesis profiles: `default` is bounded and the same in every run; HYPOTHESIS_PROFILE=deep searches for long."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_COMMON = settings(deadline=None, print_blob=True, report_multiple_bugs=False, suppress_health_check=_SLOW)

settings.register_profile("default", _COMMON, derandomize=True, max_examples=400, stateful_step_count=40)
settings.register_profile("deep", _COMMON, max_examples=10_000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
