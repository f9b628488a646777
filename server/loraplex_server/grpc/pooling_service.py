"""PoolingService of a worker: typed refusals, until embeddings are computed."""

from __future__ import annotations

from typing import Any

from loraplex_proto import validate
from loraplex_proto.v1 import pooling_pb2, pooling_pb2_grpc
from loraplex_server.grpc.middleware import RequestGate, handles_errors

Context = Any


class PoolingServicer(pooling_pb2_grpc.PoolingServiceServicer):
    """Refuses each call with Unimplemented and the field's name."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate = gate

    @handles_errors
    async def Embed(self, request: pooling_pb2.EmbedRequest, context: Context) -> pooling_pb2.EmbedResponse:
        validate.refuse_pooling(request)

    @handles_errors
    async def Classify(self, request: pooling_pb2.ClassifyRequest, context: Context) -> pooling_pb2.ClassifyResponse:
        validate.refuse_pooling(request)

    @handles_errors
    async def Score(self, request: pooling_pb2.ScoreRequest, context: Context) -> pooling_pb2.ScoreResponse:
        validate.refuse_pooling(request)
