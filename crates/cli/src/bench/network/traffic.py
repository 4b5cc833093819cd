"""One flow each way, to a child of this program and to a server outside, in turn: NAME PORT ROUNDS SECONDS.

A connection's first byte says what the other end does: `d` sends for ever, `u` takes for ever.
"""

import os
import socket
import sys
import time

BLOCK = 1 << 20


def serve(listener):
    while True:
        stream, _ = listener.accept()
        try:
            if stream.recv(1) == b"d":
                send(stream, float("inf"))
            else:
                receive(stream, float("inf"))
        except OSError:
            pass  # A client that has measured breaks off.
        stream.close()


def send(stream, until):
    block, count = memoryview(bytes(BLOCK)), 0
    while time.monotonic() < until:
        count += stream.send(block)
    return count


def receive(stream, until):
    block, count = bytearray(BLOCK), 0
    while time.monotonic() < until:
        got = stream.recv_into(block)
        if got == 0:
            break
        count += got
    return count


def measure(address, kind, seconds):
    """Mbit/s, after a warm-up of a fifth of the time."""
    with socket.create_connection(address) as stream:
        stream.sendall(kind)
        move = receive if kind == b"d" else send
        move(stream, time.monotonic() + seconds / 5)
        begin = time.monotonic()
        count = move(stream, begin + seconds)
        return count * 8 / (time.monotonic() - begin) / 1e6


def main():
    name, port, rounds, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        serve(listener)
    ways = [("own", listener.getsockname()), ("gateway", (name, port))]
    try:
        for _ in range(rounds):
            for direction, kind in [("out", b"u"), ("in", b"d")]:
                for way, address in ways:
                    print(direction, way, measure(address, kind, seconds), flush=True)
    finally:
        os.kill(child, 9)


main()
