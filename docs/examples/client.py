#!/usr/bin/env python3
"""Runs a command in a sandbox, and shows what a client of an earlier life is told.

    client.py FOLDER ARGV...

FOLDER is the sandbox's, for instance /run/vmm/box. Python's standard library is all that it needs; the protocol is
described in guest/protocol/PROTOCOL.md. The status is the command's.
"""

import json
import os
import socket
import struct
import sys


class Session:
    def __init__(self, sock, counter, public_id):        # public_id: 16 bytes
        self.sock, self.sent, self.seen, self.last = sock, 0, 0, 0
        hello = b"vmm-sess" + struct.pack("<HHQQ", 1, 1, 0, counter) + public_id
        self.send(0x01, 0, hello)
        kind, _, payload = self.receive()
        if kind != 0x41 or payload[20:] != hello[20:]:
            raise ConnectionError("not the generation that was meant")

    @classmethod
    def connect(cls, path, counter, nonce, public_id):   # nonce: 32 hexadecimal digits
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(path)
        sock.sendall(b"CONNECT 1000 %d-%s\n" % (counter, nonce.encode()))
        line = b""
        while not line.endswith(b"\n"):
            byte = sock.recv(1)
            line += byte
            if not byte or len(line) > 512:
                raise ConnectionError("no answer but %r" % line)
        if not line.startswith(b"OK "):
            raise ConnectionError(line.decode())
        session = cls(sock, counter, public_id)
        sock.settimeout(None)
        return session

    def send(self, kind, id, payload=b""):
        self.sent += 1
        self.sock.sendall(struct.pack("<IBBHQQ", len(payload), kind, 0, 0, id, self.sent) + payload)

    def exactly(self, count):
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionError("the agent closed the connection")
            data += more
        return data

    def receive(self):
        length, kind, flags, reserved, id, sequence = struct.unpack("<IBBHQQ", self.exactly(24))
        self.seen += 1
        if flags or reserved or sequence != self.seen or length > 65536:
            raise ConnectionError("protocol violation")
        return kind, id, self.exactly(length)

    def run(self, argv, env=(), limit=1 << 20, timeout_ns=0):
        def strings(items):
            items = [os.fsencode(item) for item in items]
            return struct.pack("<I", len(items)) + b"".join(struct.pack("<I", len(i)) + i for i in items)
        exec_ = strings(argv) + strings(env) + struct.pack("<I", 0)       # cwd: /
        exec_ += bytes([0, 0, 0, 1, 0])                                   # root, no tty, no stdin, kill
        exec_ += struct.pack("<QBQQ", timeout_ns, limit is not None, limit or 0, 1 << 20)
        self.last += 1
        self.send(0x02, self.last, exec_)
        offsets = [0, 0]
        while True:
            kind, id, payload = self.receive()
            if kind == 0x43:
                stream, offset, length = struct.unpack_from("<BQI", payload)
                if offset != offsets[stream - 1]:
                    raise ConnectionError("output is missing")
                offsets[stream - 1] += length
                view = payload[13:]
                while view:
                    view = view[os.write(stream, view):]
                self.send(0x08, id, struct.pack("<QQ", *(length if s == stream else 0 for s in (1, 2))))
            elif kind == 0x48:
                return status(payload)
            elif kind in (0x49, 0x4b):
                raise RuntimeError(payload[5:].decode())

def status(record):
    cause, field = record[0], record[1]
    if cause == 7:
        return 127 if field == 8 and struct.unpack_from("<i", record, 2)[0] == 2 else 126
    return {1: field, 2: 128 + field, 3: 124, 4: 125, 5: 137,
            6: {2: 130, 3: 143}.get(field, 137), 8: 125}[cause]


def main():
    folder, argv = sys.argv[1], sys.argv[2:]
    with open(os.path.join(folder, "current.json")) as file:
        current = json.load(file)
    if current["state"] != "ready":
        sys.exit("the sandbox is %s" % current["state"])
    path = os.path.join(current["folder"], "vsock.sock")
    counter, public_id = current["generation"]["counter"], bytes.fromhex(current["generation"]["id"])
    code = Session.connect(path, counter, current["nonce"], public_id).run(argv)

    # A pooled connection or a saved address of an earlier life: refused at once, before the guest hears of it.
    try:
        Session.connect(path, counter, "0" * 32, public_id)
    except ConnectionError as error:
        print("an earlier life's client is told:", str(error).strip(), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
