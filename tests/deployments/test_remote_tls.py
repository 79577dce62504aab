"""Calls under TLS: whom a client and a remote lane trust, and what they say of whom they do not."""

import asyncio
from pathlib import Path

import pytest

from deployments.addresses import Address
from deployments.client import AsyncClient, CallFailed, Client, Tokens, ask
from deployments.engine import RouterParts
from deployments.generation import ModelCard
from deployments.remote import remote_lanes
from deployments.settings import Settings, SettingsError, load_settings
from deployments.stages import Stages
from tests.deployments.certificates import self_signed
from tests.deployments.other_cluster import OtherCluster, other_cluster
from tests.deployments.test_desk import TOKENIZER, collect, desk, expected, request, tokens
from tests.deployments.test_remote import paces, until

__all__ = ["paces"]  # the fixture of remote lanes' tests holds here too

SPEC = ask("demo", [1, 2], max_tokens=3)


async def told(client: AsyncClient) -> list[int]:
    events = client.generate(SPEC)
    return [token.id async for event in events if isinstance(event, Tokens) for token in event.tokens]


async def test_a_client_calls_under_tls_whom_it_trusts_and_nobody_else() -> None:
    ca, credentials = self_signed()
    stranger, _ = self_signed()
    async with other_cluster(credentials=credentials, keys=("right",)) as other:
        address = f"grpcs://127.0.0.1:{other.port}"
        async with AsyncClient(address, ca=ca, api_key="right") as client:
            assert await told(client) == expected(request(2, 3))
        for trusted in (None, stranger):
            async with AsyncClient(address, ca=trusted, api_key="right") as client:
                with pytest.raises(CallFailed, match="CERTIFICATE_VERIFY_FAILED"):
                    await told(client)
        async with AsyncClient(f"127.0.0.1:{other.port}", api_key="right") as client:
            with pytest.raises(CallFailed, match="UNAVAILABLE"):  # in clear
                await told(client)


async def test_the_client_of_ordinary_code_does_so_too() -> None:
    ca, credentials = self_signed()
    async with other_cluster(credentials=credentials) as other:

        def call() -> list[int]:
            with Client(f"grpcs://127.0.0.1:{other.port}", ca=ca) as client:
                events = client.generate(SPEC)
                return [token.id for event in events if isinstance(event, Tokens) for token in event.tokens]

        assert await asyncio.to_thread(call) == expected(request(2, 3))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_certificates_for_a_call_in_clear_are_a_mistake(kind: type[Client] | type[AsyncClient]) -> None:
    with pytest.raises(ValueError, match="say grpcs://"):
        kind("127.0.0.1:9000", ca=b"")


def lanes_of(tmp_path: Path, ca: bytes | None, *others: tuple[str, OtherCluster]) -> Stages:
    """A router's lanes as its settings name them."""
    addresses = tuple(f"{scheme}127.0.0.1:{other.port}" for scheme, other in others)
    file = None
    if ca is not None:
        file = tmp_path / "ca.pem"
        file.write_bytes(ca)
    settings = Settings(remote_lanes=addresses, remote_ca_file=file, remote_key="right", local_lanes=False)  # type: ignore[arg-type]
    parts = RouterParts(ModelCard(settings.served_model_names, 0, 4096), TOKENIZER)
    return Stages("r", None, remote_lanes(settings, parts, "us"))


async def test_a_lane_under_tls_plays_rows_beside_one_in_clear(tmp_path: Path) -> None:
    ca, credentials = self_signed()
    async with other_cluster(credentials=credentials, keys=("right",)) as one, other_cluster() as two:
        stages = lanes_of(tmp_path, ca, ("grpcs://", one), ("", two))
        d = desk(stages)  # type: ignore[arg-type]
        stages.watch(d)
        await until(lambda: d.num_lanes == 2)
        rows = [request(i, 20) for i in range(6)]
        answers = await asyncio.gather(*[collect(d, row) for row in rows])
        assert [tokens(answer) for answer in answers] == [expected(row) for row in rows]
        assert one.backend.asked
        assert two.backend.asked
        d.close()
        stages.close()
        await asyncio.gather(*stages._watches, return_exceptions=True)


async def test_a_lane_whose_certificate_is_not_trusted_says_so_and_gets_no_rows(tmp_path: Path) -> None:
    _, credentials = self_signed()
    stranger, _ = self_signed()
    async with other_cluster(credentials=credentials) as other:
        stages = lanes_of(tmp_path, stranger, ("grpcs://", other))
        d = desk(stages)  # type: ignore[arg-type]
        stages.watch(d)
        await until(lambda: "not trusted" in next(iter(stages.remote_states.values())))
        assert d.num_lanes == 0
        stages.close()
        await asyncio.gather(*stages._watches, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("macs:9000", Address("macs:9000")),
        ("grpc://macs:9000", Address("macs:9000")),
        ("grpcs://[::1]:9443", Address("[::1]:9443", is_secure=True)),
    ],
)
def test_an_address_says_whether_it_is_called_under_tls(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.parametrize(
    "text", ["https://macs:9000", "://macs:9000", "grpcs://macs", "grpcs://macs:9000/x", "9"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        Address.parse(text)


def test_certificates_without_a_lane_under_tls_are_a_mistake_that_is_told(tmp_path: Path) -> None:
    flags = {"remote_lanes": "macs:9000", "remote_ca_file": str(tmp_path / "ca.pem")}
    with pytest.raises(SettingsError, match="no remote lane is called under TLS"):
        load_settings(flags=flags, environment={})
    flags["remote_lanes"] = "grpcs://macs:9443"
    assert load_settings(flags=flags, environment={}).remote_lanes == ("grpcs://macs:9443",)
