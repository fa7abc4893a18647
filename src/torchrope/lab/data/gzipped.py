"""Files compressed by gzip, read up to a limit: a few bytes may hold a thousand times as many."""

import gzip
from pathlib import Path


class LimitedGzip(gzip.GzipFile):
    """A file compressed by gzip that ends with an error where it holds more than it should.

    Args:
        path: The file.
        limit: Bytes that it may hold, unpacked.
    """

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path, "rb")
        self.limit = limit

    def read(self, size: int | None = -1) -> bytes:
        """Read and unpack.

        Raises:
            ValueError: beyond the limit.
        """
        beyond = self.limit + 1 - self.tell()
        content = super().read(beyond if size is None or size < 0 else min(size, beyond))
        if self.tell() > self.limit:
            raise ValueError(f"more than {self.limit:,} bytes when unpacked")
        return content
