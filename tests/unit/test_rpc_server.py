"""The server as a whole: pings, tokens, TLS, reflection, shared ports."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.slipstream.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from service.rpc import server as server_module
from service.rpc.security import TlsFiles, read_tokens
from service.rpc.server import RpcOptions
from tests.unit.rpc_harness import error_of, rpc_server, run

EAGER_PINGS = (
    ("grpc.keepalive_time_ms", 200),  # clients of gRPC's core ping once a second at most, whatever is asked
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def test_a_client_that_pings_every_second_is_not_cut_off(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a server without our options, which says too_many_pings at the third ping: so long the
    other, too, has nothing to send."""
    without = tuple(option for option in server_module.SERVER_OPTIONS if "min_ping" not in option[0])
    assert len(without) == len(server_module.SERVER_OPTIONS) - 1

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            ours = await stack.enter_async_context(rpc_server(tiny_checkpoint, channel_options=EAGER_PINGS))
            monkeypatch.setattr(server_module, "SERVER_OPTIONS", without)
            # Another value in its options gives the second channel a connection of its own kind.
            options = (*EAGER_PINGS, ("grpc.use_local_subchannel_pool", 1))
            other = await stack.enter_async_context(rpc_server(tiny_checkpoint, channel_options=options))
            watches = [one.health.Watch(health_pb2.HealthCheckRequest()) for one in (ours, other)]
            for watch in watches:
                await watch.read()
            pending = asyncio.ensure_future(watches[0].read())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watches[1].read()
            assert "many pings" in (caught.value.details() or "")
            # One more ping than the other server stood.
            done, _ = await asyncio.wait((pending,), timeout=1.1)
            assert not done
            ours.serving.set_workers([False], True)
            assert (await pending).status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(scenario())


def test_every_call_but_health_needs_a_token(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        options = RpcOptions(shares_port=False, tokens=("s3cret", "other"))
        async with rpc_server(tiny_checkpoint, options=options) as harness:
            status = harness.operations.GetStatus
            request = control_pb2.GetStatusRequest()
            for value in (
                None,
                "s3cret",
                "Bearer wrong",
                "Bearer s3cre",
                "Bearer s3cret2",
                "Basic s3cret",
                "",
            ):
                metadata = () if value is None else (("authorization", value),)
                error = await error_of(status(request, metadata=metadata))
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED, value
            for value in ("Bearer s3cret", "bearer other"):
                await status(request, metadata=(("authorization", value),))
            stream = harness.inference.Generate(inference_pb2.GenerateRequest(text="a"))
            assert await stream.code() == grpc.StatusCode.UNAUTHENTICATED
            error = await error_of(harness.channel.unary_unary("/no.such.Service/Method")(b""))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert harness.pool.generations == []
            reflecting = reflection_pb2_grpc.ServerReflectionStub(harness.channel).ServerReflectionInfo()
            assert await reflecting.code() == grpc.StatusCode.UNAUTHENTICATED
            await harness.health.Check(health_pb2.HealthCheckRequest())

    run(scenario())


def test_the_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# clients\n\n  abc  \ndef\n")
    assert read_tokens(path) == ("abc", "def")
    for text, complaint in (("# none\n", "no token"), ("a b\n", "printable"), ("ok\nschlüssel\n", "token 2")):
        path.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            read_tokens(path)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client certificates it signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    return folder


@pytest.mark.parametrize("is_mutual", [False, True])
def test_tls(tiny_checkpoint: Path, certificates: Path, is_mutual: bool) -> None:
    client_ca = certificates / "ca.pem" if is_mutual else None
    files = TlsFiles(certificates / "server.pem", certificates / "server.key", client_ca)
    ca = (certificates / "ca.pem").read_bytes()
    identity = [(certificates / f"client.{kind}").read_bytes() for kind in ("key", "pem")]

    async def can_call(port: int, credentials: grpc.ChannelCredentials | None) -> bool:
        address = f"127.0.0.1:{port}"
        if credentials is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            channel = grpc.aio.secure_channel(address, credentials)
        async with channel:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            code = await call.code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
            return code == grpc.StatusCode.OK

    async def scenario() -> None:
        options = RpcOptions(shares_port=False, tls=files)
        async with rpc_server(tiny_checkpoint, options=options) as harness:
            assert not await can_call(harness.port, None)
            assert await can_call(harness.port, grpc.ssl_channel_credentials(ca)) == (not is_mutual)
            assert await can_call(harness.port, grpc.ssl_channel_credentials(ca, *identity))

    run(scenario())


async def _reflected(harness_channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(harness_channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    reply = await call.read()
    return [service.name for service in reply.list_services_response.service]


def test_reflection_names_all_services_and_can_be_turned_off(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            names = await _reflected(harness.channel)
            assert {
                "slipstream.v1.Inference",
                "slipstream.v1.Control",
                "grpc.health.v1.Health",
                "vllm.grpc.engine.VllmEngine",
            } <= set(names)
            stub = reflection_pb2_grpc.ServerReflectionStub(harness.channel)
            for name in names:
                request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                reply = await stub.ServerReflectionInfo(iter([request])).read()
                assert reply.file_descriptor_response.file_descriptor_proto, name
        async with rpc_server(tiny_checkpoint, options=RpcOptions(False, shares_port=False)) as harness:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _reflected(harness.channel)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario())


def test_two_servers_share_a_port_only_if_told_to(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, options=RpcOptions()) as first:
            address = f"127.0.0.1:{first.port}"
            second = server_module.RpcServer(first.serving, first.control, RpcOptions())
            assert await second.start(address) == first.port
            await second.stop(0)
            third = server_module.RpcServer(first.serving, first.control, RpcOptions(shares_port=False))
            with pytest.raises(RuntimeError):
                await third.start(address)
            await third.stop(0)

    run(scenario())


def test_stop_lets_calls_finish_within_the_grace(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            inference: inference_pb2_grpc.InferenceStub = harness.inference
            calls = [inference.Generate(inference_pb2.GenerateRequest(text="a")) for _ in range(2)]
            finishing, hanging = [await harness.pool.submitted(i + 1) for i in range(2)]
            stopping = asyncio.ensure_future(harness.server.stop(0.3))
            finishing.finish(0)
            await asyncio.wait([asyncio.ensure_future(call.code()) for call in calls])
            assert {await call.code() for call in calls} == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            await stopping
            await hanging.closed.wait()
            assert finishing.closed.is_set()

    run(scenario())
