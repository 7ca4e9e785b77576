"""Servers for integration tests."""

from tests.support.peers import direct, gateways
from tests.support.triton import triton, triton_demo

__all__ = ["direct", "gateways", "triton", "triton_demo"]
