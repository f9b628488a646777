"""Enums of the wire, by the names that records have for them."""

from __future__ import annotations

from typing import Final

from loraplex_contracts.adapters import AdapterState, AdapterTier
from loraplex_contracts.request import FinishReason
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2

ADAPTER_STATES: Final[dict[AdapterState, adapter_pb2.AdapterState.ValueType]] = {
    "known": adapter_pb2.ADAPTER_STATE_KNOWN,
    "fetching": adapter_pb2.ADAPTER_STATE_FETCHING,
    "on_host": adapter_pb2.ADAPTER_STATE_ON_HOST,
    "on_device": adapter_pb2.ADAPTER_STATE_ON_DEVICE,
    "draining": adapter_pb2.ADAPTER_STATE_DRAINING,
    "failed": adapter_pb2.ADAPTER_STATE_FAILED,
}
ADAPTER_TIERS: Final[dict[AdapterTier, adapter_pb2.AdapterTier.ValueType]] = {
    "source": adapter_pb2.ADAPTER_TIER_SOURCE,
    "disk": adapter_pb2.ADAPTER_TIER_DISK,
    "host": adapter_pb2.ADAPTER_TIER_HOST,
    "device": adapter_pb2.ADAPTER_TIER_DEVICE,
}
FINISH_REASONS: Final[dict[FinishReason, inference_pb2.FinishReason.ValueType]] = {
    FinishReason.EOS: inference_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
POOLINGS: Final[dict[str, pooling_pb2.Pooling.ValueType]] = {
    "last_token": pooling_pb2.POOLING_LAST_TOKEN,
    "mean": pooling_pb2.POOLING_MEAN,
}
SCORE_METHODS: Final[dict[str, pooling_pb2.ScoreMethod.ValueType]] = {
    "classifier": pooling_pb2.SCORE_METHOD_CLASSIFIER,
    "cosine": pooling_pb2.SCORE_METHOD_COSINE,
    "next_token": pooling_pb2.SCORE_METHOD_NEXT_TOKEN,
}
