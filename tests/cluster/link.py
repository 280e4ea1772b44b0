"""A wire between the bridge and a node that loses frames on their way to the node and brings them late.

It is a process: `python -m tests.cluster.link NODE LOSS DELAY`, in the rack's network, until it is told to end. (The
kernel's own netem is not everywhere.) The bridge's end is a TAP device, which goes with the process.
"""

from __future__ import annotations

import array
import collections
import fcntl
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
SIOCETHTOOL, SEND_CHECKSUMS, SEND_SEGMENTS, SEGMENTS = 0x8946, 0x17, 0x1F, 0x24
ETH_P_ALL = 3
LONGEST = 2**16


def set_offloads(device: str, on: bool) -> None:
    """Let frames leave a device whole, with their checksums, as a wire would see them (`ethtool -K`); or not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in (SEND_CHECKSUMS, SEND_SEGMENTS, SEGMENTS):
            value = array.array("I", [command, on])
            fcntl.ioctl(asked, SIOCETHTOOL, struct.pack("16sP16x", device.encode(), value.buffer_info()[0]))


def carry(node: str, loss: float, delay: float) -> None:
    """Carry frames between the bridge and a node's port until SIGTERM; print how many were lost of those sent to it.

    Args:
        loss: the chance of a frame to the node.
        delay: in seconds, of each.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TAP | IFF_NO_PI))
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.bind((node, 0))
    for command in (f"ip link set {node} nomaster", "ip link set wire master bridge up"):
        subprocess.run(command.split(), check=True)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    ready = selectors.DefaultSelector()
    ready.register(tap, selectors.EVENT_READ)
    ready.register(port, selectors.EVENT_READ)
    print("ready", flush=True)
    under_way: collections.deque[tuple[float, bytes]] = collections.deque()
    sent = lost = 0
    while not ending:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
        for key, _ in ready.select(wait):
            if key.fileobj == tap:
                frame = os.read(tap, LONGEST)
                sent += 1
                if random.random() < loss:
                    lost += 1
                else:
                    under_way.append((time.monotonic() + delay, frame))
            else:
                frame, (*_, kind, _hardware, _address) = port.recvfrom(LONGEST)
                if kind != socket.PACKET_OUTGOING:
                    os.write(tap, frame)
        while under_way and under_way[0][0] <= time.monotonic():
            port.send(under_way.popleft()[1])
    print(f"{lost} of {sent}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "offloads":
        set_offloads(sys.argv[2], sys.argv[3] == "on")
    else:
        carry(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
