"""Helpers for the tests of several rooms."""

import pytest

pytest.register_assert_rewrite("support.devices", "support.resuming")
