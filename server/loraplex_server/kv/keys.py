"""Content keys of KV blocks: equal keys mean equal keys and values.

A key is a SHA-256 chain over everything that a block's content depends on: the tokens before it, its own tokens, the
base model, the adapters in effect, and their tenant. Every field is length-prefixed or of fixed width: two different
inputs never have the same encoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex_contracts.adapters import AdapterKey

_LENGTH = struct.Struct("<Q")
_WEIGHT = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides tokens decides a block's content, and who may see it.

    `adapters` are those that change K or V at these tokens, with their weight in a mixture, in the order in which they
    are added up. The salt is the client's own: prompts with different salts never share.
    """

    model_digest: str
    adapters: tuple[tuple[AdapterKey, float], ...] = ()
    tenant: str = ""
    cache_salt: str = ""

    def digest(self) -> bytes:
        parts = [b"loraplex kv namespace\x01", _field(self.model_digest), _LENGTH.pack(len(self.adapters))]
        for key, weight in self.adapters:
            parts += (_field(key.kind), _field(key.digest), _WEIGHT.pack(weight))
        parts += (_field(self.tenant), _field(self.cache_salt))
        return hashlib.sha256(b"".join(parts)).digest()


def _field(text: str) -> bytes:
    # surrogatepass: no string of a client's, however odd, may raise in here.
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data


class KeyChain:
    """The keys of one sequence's full blocks, made on demand and kept. The sequence owns it.

    One namespace for the whole sequence so far; a block's key takes the one in effect at its own tokens.
    """

    __slots__ = ("_namespace", "_pack", "keys")

    def __init__(self, namespace: bytes, block_size: int) -> None:
        assert len(namespace) == 32
        self._namespace = namespace
        # Four bytes a token: a vocabulary beyond 2**32 does not exist, and fixed width leaves nothing to confuse.
        self._pack = struct.Struct(f"<{block_size}I")
        self.keys: list[bytes] = []

    def key(self, block_idx: int, token_ids: Sequence[int]) -> bytes:
        """The key of block `block_idx`, which `token_ids` (the sequence from its beginning) must fill."""
        keys, size = self.keys, self._pack.size // 4
        while len(keys) <= block_idx:
            start = len(keys) * size
            # The first block's parent is its block size: the same tokens in larger blocks are another content.
            parent = keys[-1] if keys else size.to_bytes(32, "little")
            keys.append(block_key(parent, self._namespace, self._pack.pack(*token_ids[start : start + size])))
        return keys[block_idx]

    def fork(self, num_blocks: int) -> KeyChain:
        """A chain of its own that begins with the same `num_blocks` keys."""
        chain = KeyChain.__new__(KeyChain)
        chain._namespace, chain._pack, chain.keys = self._namespace, self._pack, self.keys[:num_blocks]
        return chain


def block_key(parent: bytes, namespace: bytes, packed_tokens: bytes) -> bytes:
    """The key of a block behind `parent`. Parent and namespace are 32 bytes each, so the rest is the tokens."""
    return hashlib.sha256(parent + namespace + packed_tokens).digest()
