"""Prompts alone: requests for no new token, and their answers. Pure.

The wire makes one new token at least. It is made one without a text, and dropped from the answer.
"""

from __future__ import annotations

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate


def leave_out_new_text(request: pb.GenerateRequest) -> None:
    """Makes the request's one new token one that is no part of the text, whatever the tokenizer is. Raises
    InvalidArgument for options that would be refused in any other request."""
    check_generate(request)
    request.sampling.CopyFrom(pb.Sampling(temperature=0, allowed_token_ids=[0]))
    request.stopping.CopyFrom(pb.Stopping(max_tokens=1, stop_token_ids=[0]))
    request.ClearField("grammar")


def drop_new(completion: pb.Completion | pb.GenerateStreamResponse) -> None:
    """Drops the token that was made, which has no text: the prompt alone is left."""
    for name in ("token_ids", "logprobs", "stop_string", "stop_token_id"):
        completion.ClearField(name)
    if completion.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        completion.finish_reason = pb.FINISH_REASON_LENGTH
        completion.usage.completion_tokens = 0
