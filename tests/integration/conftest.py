"""Servers for integration tests."""

from tests.support.triton import triton, triton_demo

__all__ = ["triton", "triton_demo"]
