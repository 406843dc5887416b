"""Checkpoints in an S3 bucket: ``s3://BUCKET/PREFIX``, by the standard library alone.

botocore, which boto3 and s3fs are made of, cannot be installed beside kubernetes 37
(python-dateutil), and five requests are all that is needed. Each is signed as AWS Signature
Version 4 says, with the SHA-256 of what is sent, so that a server refuses what arrives otherwise.

    AWS_ACCESS_KEY_ID  AWS_SECRET_ACCESS_KEY  AWS_SESSION_TOKEN    who asks
    AWS_ENDPOINT_URL                                               a server that is not Amazon's
    AWS_REGION                                                     us-east-1 if there is none
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

from ranks import BadInput, Explained, Unavailable

PART = 64 << 20  # bytes that are sent at once; a server takes at most 5 GiB
_AGAIN = (0.5, 2.0, 8.0)  # seconds before each further try
_WORDS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "these credentials may not do that",
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID is not known there",
    "XAdminUserNotFound": "AWS_ACCESS_KEY_ID is not known there",  # versitygw's
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is wrong",
}


def is_url(folder: object) -> bool:
    return "://" in str(folder)


class Bucket:
    """What lies in a bucket below a prefix."""

    def __init__(self, url: str, environ: Mapping[str, str] = os.environ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise BadInput(f"checkpoint folder {url}: only s3://BUCKET/PREFIX is known")
        self.url, self._bucket, self._prefix = url.rstrip("/"), parts.netloc, parts.path.strip("/")
        try:
            self._key, self._secret = environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]
        except KeyError as error:
            names = "secrets: [AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]"
            raise BadInput(f"{url}: {error.args[0]} is not set", f"{names} in the job") from None
        self._token = environ.get("AWS_SESSION_TOKEN")
        self._region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        server = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        self._server = urlsplit(server or f"https://s3.{self._region}.amazonaws.com")
        if self._server.scheme not in ("http", "https") or not self._server.hostname:
            raise BadInput(f"AWS_ENDPOINT_URL is {server!r}", "give http://HOST:PORT or https://")

    def sizes(self) -> dict[str, int]:
        """Of all files, by their names below the prefix."""
        found: dict[str, int] = {}
        more = {"list-type": "2", "prefix": self._name("")}
        while True:
            page = ElementTree.fromstring(self._ask("GET", None, more))
            space = page.tag.partition("}")[0] + "}" if page.tag[0] == "{" else ""
            for each in page.iter(f"{space}Contents"):
                name = str(each.findtext(f"{space}Key")).removeprefix(self._name(""))
                found[name] = int(each.findtext(f"{space}Size") or 0)
            token = page.findtext(f"{space}NextContinuationToken")
            if not token:
                return found
            more["continuation-token"] = token

    def read(self, name: str) -> bytes:
        return self._ask("GET", name)

    def write(self, name: str, data: bytes) -> None:
        self._ask("PUT", name, body=data)

    def remove(self, name: str) -> None:
        self._ask("DELETE", name)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._ask("GET", name, target=path)

    def upload(self, path: Path, name: str) -> None:
        """One that is large goes in parts, and is there when all are."""
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= PART:
                return self.write(name, file.read())
            begun = self._ask("POST", name, {"uploads": ""}).decode()
            upload = re.search(r"<UploadId>(.*?)</UploadId>", begun)
            key = {"uploadId": upload[1] if upload else ""}
            done = ""
            for number in range(1, -(-size // PART) + 1):
                query = {"partNumber": str(number), **key}
                tag = self._ask("PUT", name, query, file.read(PART)).decode()
                done += f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            done = f"<CompleteMultipartUpload>{done}</CompleteMultipartUpload>"
            # It may say so in an answer that begins with 200.
            if b"<Error>" in (answer := self._ask("POST", name, key, done.encode())):
                raise self._refused(200, answer)
        return None

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _ask(
        self, method: str, name: str | None, query: Mapping[str, str] | None = None,
        body: bytes = b"", target: Path | None = None,
    ) -> bytes:  # fmt: skip
        """What the server answers; to a part that is sent, its tag. Tried again where it may help.

        Raises:
            BadInput: it refuses.
            Unavailable: it does not answer.
        """
        path = f"{self._server.path.rstrip('/')}/{self._bucket}"
        path = quote(path if name is None else f"{path}/{self._name(name)}", safe="/-_.~")
        text = "&".join(f"{k}={quote(v, safe='-_.~')}" for k, v in sorted((query or {}).items()))
        for pause in (*_AGAIN, None):
            try:
                status, answer = self._try(method, path, text, body, target)
            except (OSError, http.client.HTTPException) as error:
                if target is not None and isinstance(error, OSError) and error.filename:
                    raise  # this machine's disk
                problem: Explained = Unavailable(
                    f"{self.url}: {self._server.netloc} does not answer: {error}",
                    hint="AWS_ENDPOINT_URL says where the server is",
                )
            else:
                if status < 300:
                    return answer
                problem = self._refused(status, answer)
                if status < 500 and status != 429:
                    raise problem
            if pause is None:
                raise problem
            time.sleep(pause)
        raise AssertionError

    def _try(
        self, method: str, path: str, query: str, body: bytes, target: Path | None
    ) -> tuple[int, bytes]:
        kind = (
            http.client.HTTPSConnection if self._server.scheme == "https"
            else http.client.HTTPConnection
        )  # fmt: skip
        connection = kind(str(self._server.hostname), self._server.port, timeout=60)
        try:
            headers = self._signed(method, path, query, body)
            connection.request(method, f"{path}?{query}" if query else path, body or None, headers)
            answer = connection.getresponse()
            if answer.status < 300 and target is not None:
                with target.open("wb") as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
                wanted = int(answer.headers.get("Content-Length", -1))
                if wanted not in (-1, target.stat().st_size):
                    raise http.client.IncompleteRead(b"", wanted)
                return answer.status, b""
            said = answer.read()
            tag = answer.headers.get("ETag", "") if query.startswith("partNumber") else ""
            return answer.status, said if answer.status >= 300 or not tag else tag.encode()
        finally:
            connection.close()

    def _signed(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": self._server.netloc, "x-amz-content-sha256": digest, "x-amz-date": at}
        if self._token:
            headers["x-amz-security-token"] = self._token
        names = ";".join(sorted(headers))
        lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
        request = "\n".join([method, path, query, *lines, "", names, digest])
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self._secret}".encode()
        for part in (*scope.split("/"), text):
            key = hmac.digest(key, part.encode(), "sha256")
        who = f"AWS4-HMAC-SHA256 Credential={self._key}/{scope}"
        return {
            **headers, "Content-Length": str(len(body)),
            "Authorization": f"{who}, SignedHeaders={names}, Signature={key.hex()}",
        }  # fmt: skip

    def _refused(self, status: int, answer: bytes) -> BadInput:
        found = re.search(r"<Code>(\w+)</Code>", answer.decode(errors="replace"))
        code = found[1] if found else f"HTTP {status}"
        return BadInput(f"{self.url}: {_WORDS.get(code, f'the server says {code}')}")
