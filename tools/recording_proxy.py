"""A proxy that records requests (tools/sglang-router --record)."""
import contextlib, re, socket, threading


class Proxy:
    """A proxy for one worker. It forwards all bytes and records the requests of each connection."""

    def __init__(self, worker):
        self.worker, self.connections = worker, []
        self.listener = socket.create_server((worker.host, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            front, _ = self.listener.accept()
            back = socket.create_connection((self.worker.host, self.worker.port))
            kept = bytearray()
            self.connections.append(kept)
            threading.Thread(target=self.copy, args=(front, back, kept), daemon=True).start()
            threading.Thread(target=self.copy, args=(back, front, None), daemon=True).start()

    @staticmethod
    def copy(source, sink, kept):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if kept is not None:
                    kept.extend(piece)
                sink.sendall(piece)
        for end in source, sink:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR if end is sink else socket.SHUT_RD)

    def take(self):
        """The requests recorded since the last call."""
        requests = []
        for kept in self.connections:
            while kept:
                one = first_request(bytes(kept))
                requests.append(one)
                del kept[:len(one)]
        return requests


def first_request(stream):
    """The first request of a stream; the whole stream if it is not HTTP/1."""
    if stream.startswith(b"PRI "):
        return stream
    head, end, body = stream.partition(b"\r\n\r\n")
    assert end, f"incomplete head: {stream!r}"
    assert b"transfer-encoding" not in head.lower(), head
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    length = int(length[1]) if length else 0
    assert len(body) >= length, f"incomplete body: {stream!r}"
    return head + end + body[:length]
