"""Tests of tiny models find the CPU kernels that earlier runs compiled."""

from tests.kept_kernels import keep_kernels

keep_kernels()
