"""The guard in front of the explorer: who may ask, for what, and how much."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Guard:
    """Lets through requests to known hosts, from our own pages, with the token where one is needed.

    A page elsewhere can make a browser send requests here; the Host and Origin that the browser adds betray it.
    """

    app: ASGIApp
    hosts: tuple[str, ...] | None
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, _adding(send))
            return
        await self.app(scope, receive, _adding(send))

    def _refused(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").lower()
        if self.hosts is not None and host_name(host) not in self.hosts:
            return _no(f"this server answers only as {', '.join(self.hosts)}.")
        origin = headers.get("origin")
        if origin is not None and _site(origin) != host:
            return _no("this request comes from a page of another site.")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not _is_link(scope, headers):
            return _no("this request comes from a page of another site.")
        return None if self.token is None else self._checked(scope, headers)

    def _checked(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """None with the right cookie; with the right token in the address a cookie, and the page again."""
        assert self.token is not None
        # Cookies are those of a host, whatever the port: each of its servers has a name of its own.
        _, port = scope.get("server") or ("", "")
        name = f"dualform_token_{port}"
        if _same(cookie_parser(headers.get("cookie", "")).get(name, ""), self.token):
            return None
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(_same(value, self.token) for key, value in asked if key == "token"):
            return _no("this server needs the token that `dualform serve` printed: open the address it printed.")
        rest = urlencode([(key, value) for key, value in asked if key != "token"])
        answer = RedirectResponse((scope["path"] or "/") + (f"?{rest}" if rest else ""), status_code=303)
        answer.set_cookie(name, self.token, httponly=True, samesite="lax")
        return answer


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("localhost:8080"), host_name("[::1]:80"), host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _site(origin: str) -> str | None:
    """The host and port of an Origin header; None for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_link(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether somebody followed a link to a page, in a mail or a notebook; who gave the link cannot read the page."""
    opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return opened and scope["method"] == "GET"


def hosts_of(host: str) -> tuple[str, ...] | None:
    """The names under which a server that listens there is asked; None where that cannot be known."""
    if host in LOOPBACK:
        return LOOPBACK
    return None if host in ("0.0.0.0", "::", "") else (host.lower(), *LOOPBACK)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _no(reason: str) -> JSONResponse:
    return JSONResponse({"error": f"Refused: {reason}"}, status_code=403)


def _adding(send: Send) -> Send:
    """Put our headers on every answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there: Iterable[tuple[bytes, bytes]] = message.get("headers", [])
            ours = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in HEADERS.items()]
            message = {**message, "headers": [*there, *ours]}
        await send(message)

    return sending
