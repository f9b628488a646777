"""Draft model proposers: by token ids, or by text across tokenizers."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from loraplex_contracts.plan import Candidate
from loraplex_server.speculation.draft_model.drafter import Drafter
from loraplex_server.speculation.draft_model.recoding import RecodedText, Recoder, prefix_of
from loraplex_server.speculation.draft_model.rows import Wanted
from loraplex_server.speculation.proposer import DRAFT_MODEL, UNIVERSAL, Ask
from loraplex_server.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

_MAX_RATIO = 4.0  # draft tokens for one of the target's


class DraftModelProposer:
    """Implements Proposer, with a draft model of the target's token ids. Owns the drafter."""

    def __init__(self, drafter: Drafter, *, num_target_ids: int, eos_token_ids: Collection[int]) -> None:
        """`num_target_ids`: token ids below it are the target's. `eos_token_ids`: the target's."""
        self.drafter = drafter
        self._num_target_ids = num_target_ids
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def name(self) -> str:
        return DRAFT_MODEL

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        drafts = self.drafter.draft([self._want(ask) for ask in asks])
        return [self._within_vocabulary(draft) for draft in drafts]

    def num_behind(self, candidate: Candidate) -> int:
        return self.drafter.num_behind(candidate.sequence_id, len(candidate.token_ids))

    def suspend(self, sequence_id: str) -> None:
        self.end(sequence_id)

    def end(self, sequence_id: str) -> None:
        self.drafter.forget(sequence_id)

    def close(self) -> None:
        self.drafter.close()

    def _want(self, ask: Ask) -> Wanted:
        candidate = ask.candidate
        request = candidate.request
        stop_ids = self._stop_ids(candidate)
        return Wanted(
            sequence_id=candidate.sequence_id,
            token_ids=candidate.token_ids,
            num_tokens=_num_tokens(ask),
            num_prompt_tokens=candidate.num_prompt_tokens,
            sampling=candidate.sampling,
            min_tokens=request.stopping.min_tokens,
            banned_until_min=stop_ids,
            stop_ids=stop_ids,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def _within_vocabulary(self, draft: Sequence[int]) -> tuple[int, ...]:
        """Models of one tokenizer may be padded to different sizes."""
        for idx, token_id in enumerate(draft):
            if token_id >= self._num_target_ids:
                return tuple(draft[:idx])
        return tuple(draft)

    def _stop_ids(self, candidate: Candidate) -> frozenset[int]:
        """The tokens that end the completion, as in the scheduler."""
        stopping = candidate.request.stopping
        return stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else self._eos_token_ids)


class UniversalProposer(DraftModelProposer):
    """Drafts by way of text: the draft model has another vocabulary. Both tokenizers have text."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        target_tokenizer: TextTokenizer,
        draft_tokenizer: TextTokenizer,
        num_target_ids: int,
        eos_token_ids: Collection[int],
    ) -> None:
        super().__init__(drafter, num_target_ids=num_target_ids, eos_token_ids=eos_token_ids)
        target, draft = target_tokenizer.vocabulary, draft_tokenizer.vocabulary
        assert target is not None, "drafting by way of text needs the target's tokenizer"
        assert draft is not None, "drafting by way of text needs the draft model's tokenizer"
        plain = draft_tokenizer.encode("a", add_special_tokens=False)
        self._recoder = Recoder(target, draft, prefix_of(draft_tokenizer.encode("a"), plain))
        self._draft_eos_ids = draft_tokenizer.eos_token_ids | frozenset(drafter.loaded.spec.eos_token_ids)
        self._draft_stop_ids = self._recoder.draft_specials | self._draft_eos_ids
        self._texts: dict[str, RecodedText | None] = {}  # None: recoding failed

    @property
    def name(self) -> str:
        return UNIVERSAL

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        texts = [self._text(ask) for ask in asks]
        wants = [self._want_of_text(ask, text) for ask, text in zip(asks, texts, strict=True) if text is not None]
        found = iter(self.drafter.draft(wants))
        return [
            self._proposal(ask, text, next(found)) if text is not None else ()
            for ask, text in zip(asks, texts, strict=True)
        ]

    def end(self, sequence_id: str) -> None:
        self._texts.pop(sequence_id, None)
        super().end(sequence_id)

    def close(self) -> None:
        self._texts.clear()
        super().close()

    def _text(self, ask: Ask) -> RecodedText | None:
        """The sequence's text up to its last token; None when no draft can come."""
        candidate = ask.candidate
        sequence_id = candidate.sequence_id
        if _num_tokens(ask) < 1 or self.drafter.has_refused(sequence_id):
            return None
        try:
            if sequence_id not in self._texts:
                self._texts[sequence_id] = RecodedText(self._recoder, candidate.token_ids)
            text = self._texts[sequence_id]
            if text is not None:
                text.extend(candidate.token_ids)
        except Exception as error:  # a tokenizer may fail on an arbitrary text
            self._give_up(sequence_id, error)
            return None
        # A text of special tokens alone may be empty in the other vocabulary.
        return text if text is not None and text.ids else None

    def _want_of_text(self, ask: Ask, text: RecodedText) -> Wanted:
        request = ask.candidate.request
        return Wanted(
            sequence_id=ask.candidate.sequence_id,
            token_ids=text.ids,
            num_tokens=math.ceil(_num_tokens(ask) * min(text.ratio, _MAX_RATIO)),
            num_same=text.take_num_same(),
            num_settled=text.num_settled,
            stop_ids=self._draft_stop_ids,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )

    def _proposal(self, ask: Ask, text: RecodedText, drafted: Sequence[int]) -> tuple[int, ...]:
        if not drafted:
            return ()
        ends = drafted[-1] in self._draft_eos_ids
        spoken = drafted[:-1] if drafted[-1] in self._draft_stop_ids else drafted
        try:
            found = text.proposal(spoken)
        except Exception as error:
            self._give_up(ask.candidate.sequence_id, error)
            return ()
        if ends and (found or not spoken):
            found += sorted(self._stop_ids(ask.candidate) & self._eos_token_ids)[:1]
        return self._within_vocabulary(found)[: _num_tokens(ask)]

    def _give_up(self, sequence_id: str, error: Exception) -> None:
        fields = {"proposer": self.name, "error_type": type(error).__name__}
        message = "no drafts for %s: its text cannot be put into the other vocabulary: %s"
        log.warning(message, sequence_id, error, extra=fields)
        self._texts[sequence_id] = None


def _num_tokens(ask: Ask) -> int:
    return min(ask.num_tokens, ask.candidate.num_room)
