"""The methods that are compared, by name."""

from benchmarks.peers.bitsandbytes import BitsAndBytes
from benchmarks.peers.fbgemm import Fbgemm
from benchmarks.peers.gemlite import GemLite
from benchmarks.peers.humming import Humming, HummingInvariant
from benchmarks.peers.invariant import Dequantizing, TorchWithoutSplitK, VllmInvariant
from benchmarks.peers.lowbit import Lowbit, LowbitInvariant, LowbitWithQuantization
from benchmarks.peers.peer import Job, Layer, Peer
from benchmarks.peers.torchao import TorchAo
from benchmarks.peers.vendor import TinyGemm, Torch, TorchFp8

__all__ = ["MODEL_PEERS", "PEERS", "Job", "Layer", "Peer"]

_OURS = (Lowbit(), LowbitWithQuantization(), LowbitInvariant())
_OTHERS = (TorchFp8(), Humming(), HummingInvariant(), Fbgemm(), GemLite(), TinyGemm(), BitsAndBytes())
_DENSE = (Torch(), TorchWithoutSplitK(), VllmInvariant())
_DEQUANTIZED = map(Dequantizing, _DENSE)
PEERS: dict[str, Peer] = {peer.name: peer for peer in (*_DENSE, *_DEQUANTIZED, *_OURS, *_OTHERS)}
MODEL_PEERS: dict[str, Peer] = {peer.name: peer for peer in (TorchAo(), BitsAndBytes(), GemLite())}
"""Those that whole models are measured with."""
