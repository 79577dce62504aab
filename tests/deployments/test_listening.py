"""Addresses to listen on: free or taken, on kernels with and without IPv6."""

import errno
import os
import socket

import pytest

from deployments.doctor.ports import check_wanted
from deployments.listening import bind_fault, everywhere, host_port
from deployments.settings import Settings
from tests.deployments.conftest import free_port


@pytest.fixture
def no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6 under a Python that was built with it."""
    real = socket.socket

    def refuse(family: int = socket.AF_INET, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *rest)

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "has_ipv6", True)


def test_an_address_in_use_is_told_in_the_systems_words():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        assert bind_fault("127.0.0.1", held.getsockname()[1]) == os.strerror(errno.EADDRINUSE)
    assert bind_fault("127.0.0.1", free_port()) is None


@pytest.mark.usefixtures("no_ipv6")
def test_without_ipv6_everywhere_is_what_is_left_and_nothing_fails():
    assert everywhere() == "0.0.0.0"
    assert bind_fault("::1", free_port()) == os.strerror(errno.EAFNOSUPPORT)
    wanted = Settings(http_port=free_port(), grpc_port=free_port())
    assert {finding.level for finding in check_wanted(wanted, [])} == {"ok"}


def test_ipv6_literals_are_bracketed():
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("127.0.0.1", 80) == "127.0.0.1:80"
