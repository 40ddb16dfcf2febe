"""vLLM endpoint plugin: `profile --url` reaches every worker through the server's own HTTP port.

Entry point of `vllm.endpoint_plugins` (vLLM 0.32). vLLM loads it only where VLLM_PLUGINS names `syncfree`. It answers
nobody unless the server was started with a token in SYNCFREE_TOKEN. Workers are reached through `collective_rpc`, so
it does not matter which executor runs them, nor on which node; with data parallelism vLLM hands back the answers of the
first replica only, and only that one is profiled.
"""

from __future__ import annotations

import hmac
import logging
import os
from typing import Any

import msgspec

from ...profiler.agent.relay import MAX_EXCHANGE_BYTES, PATH, TOKEN_VARIABLE, Exchange, Mail, WorkerMail
from .mail import METHOD

logger = logging.getLogger("syncfree")

RPC_SECONDS = 20.0
_decoder = msgspec.msgpack.Decoder(Exchange)


class Refused(Exception):
    """An HTTP status and one line that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Endpoint:
    """The route, and the engine behind it once the server is up."""

    name = "syncfree"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: Any = None
        self._token = os.environ.get(TOKEN_VARIABLE, "")

    def attach_router(self, app: Any) -> None:
        """Add the route. Called by vLLM while it builds the server."""
        from fastapi import Request, Response

        async def exchange(request: Request) -> Response:
            try:
                body = await self._body(request)
                answer = await self.exchange(request.headers.get("authorization", ""), body)
            except Refused as refused:
                return Response(str(refused), refused.status, media_type="text/plain")
            return Response(answer, media_type="application/msgpack")

        exchange.__annotations__ = {"request": Request, "return": Response}  # not text: FastAPI reads them
        app.add_api_route(PATH, exchange, methods=["POST"], include_in_schema=False, response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the engine; None on vLLM's render server, which has none."""
        self._engine = engine_client

    async def _body(self, request: Any) -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_EXCHANGE_BYTES:
                raise Refused(413, f"expected at most {MAX_EXCHANGE_BYTES} bytes")
        return body

    async def exchange(self, authorization: str, body: bytes) -> bytes:
        """Check the token, pass the messages on, return what the workers have answered so far."""
        if not self._token:
            raise Refused(403, f"the server was started without {TOKEN_VARIABLE}: nobody may profile it by URL")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            raise Refused(401, f"expected the server's token: set {TOKEN_VARIABLE} to it")
        if self._engine is None:
            raise Refused(503, "this server has no engine")
        try:
            asked = _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Refused(400, str(error).splitlines()[0]) from None
        try:
            told = await self._engine.collective_rpc(METHOD, timeout=RPC_SECONDS, args=(asked.client, asked.messages))
        except Exception as error:  # noqa: BLE001 - the client gets the reason; the server goes on
            logger.warning("syncfree: collective_rpc failed: %s: %s", type(error).__name__, error)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Refused(502, f"the workers could not be asked: {reason}") from None
        workers = [WorkerMail(worker=w, rank=rank, replies=replies, error=why) for w, rank, replies, why in told]
        return msgspec.msgpack.encode(Mail(workers=workers))
