"""The methods that are compared, by name."""

from benchmarks.peers.bitsandbytes import BitsAndBytes
from benchmarks.peers.gemlite import GemLite
from benchmarks.peers.humming import Humming
from benchmarks.peers.lowbit import Lowbit
from benchmarks.peers.peer import Job, Layer, Peer
from benchmarks.peers.vendor import TinyGemm, Torch, TorchFp8

__all__ = ["PEERS", "Job", "Layer", "Peer"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (Torch(), Lowbit(), TorchFp8(), Humming(), GemLite(), TinyGemm(), BitsAndBytes())
}
