"""The explorer's server: pages, their numbers, and the files of the page; nothing else can be read."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from dualform.errors import BadCall, DualformError, MissingExtra
from dualform.view.explorer.guard import Guard, hosts_of
from dualform.view.explorer.subject import Subject
from dualform.view.explorer.views import ImagesView, View, views_of

logger = logging.getLogger("dualform")
QUICK, SLOW = 2, 1  # answers at a time
WAITING = 200  # requests that may wait
UPLOAD = 8 << 20  # bytes of an image file
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


class Explorer:
    """The web application on one subject."""

    def __init__(self, subject: Subject) -> None:
        self.views: list[View] = views_of(subject)
        self._title = subject.title
        self._files = _static()
        self._quick, self._slow = anyio.CapacityLimiter(QUICK), anyio.CapacityLimiter(SLOW)
        self._waiting = 0

    def app(self, host: str = "127.0.0.1", token: str | None = None) -> Guard:
        """The application behind its guard."""
        routes = [
            Route("/", self._home),
            Route("/about.json", self._about),
            Route("/static/{name:path}", self._file),
            *(Route(f"/{view.name}", self._page(view)) for view in self.views),
        ]
        images = self._images()
        if images is not None:
            routes += [
                Route("/images/examples.json", self._examples),
                Route("/images/train/{example}.png", self._train_image),
                Route("/images/upload", self._upload, methods=["POST"]),
            ]
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_problem, DualformError: _bad_request, Exception: _problem},
        )
        return Guard(app, hosts_of(host), token)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for view in self.views:
            view.close()

    async def _home(self, request: Request) -> Response:
        return RedirectResponse(f"/{self.views[0].name}", status_code=307)

    async def _about(self, request: Request) -> Response:
        images = self._images()
        return JSONResponse(
            {
                "title": self._title,
                "views": [{"name": view.name, "title": view.title} for view in self.views],
                "images": None if images is None else images.setting(),
            }
        )

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404, f"there is no file {name[:60]!r}.")
        content = self._files[name]()
        return Response(content, media_type=TYPES[Path(name).suffix], headers={"cache-control": "no-cache"})

    def _page(self, view: View) -> Callable[[Request], Any]:
        async def page(request: Request) -> Response:
            if not _wants_json(request):
                return Response(self._files["index.html"](), media_type=TYPES[".html"], headers={"vary": "accept"})
            parameters = _parameters(request)
            slow = await self._run(self._quick, lambda: view.is_slow(parameters))
            limiter = self._slow if slow else self._quick
            found = await self._run(limiter, lambda: view.data(parameters))
            return JSONResponse(found, headers={"vary": "accept", "cache-control": "no-store"})

        return page

    async def _examples(self, request: Request) -> Response:
        view, parameters = self._images(), _parameters(request)
        assert view is not None
        return JSONResponse(await self._run(self._quick, lambda: view.examples(parameters)))

    async def _train_image(self, request: Request) -> Response:
        view, example = self._images(), request.path_params["example"]
        assert view is not None
        content = await self._run(self._quick, lambda: view.train_image(example))
        return Response(content, media_type="image/png", headers={"cache-control": "no-cache"})

    async def _upload(self, request: Request) -> Response:
        view = self._images()
        assert view is not None
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                if len(content) > UPLOAD:
                    raise HTTPException(413, f"an image file may have at most {UPLOAD >> 20} MB.")
        except ClientDisconnect:
            raise HTTPException(400, "the file did not arrive.") from None
        invert = request.query_params.get("invert") == "yes"
        return JSONResponse(await self._run(self._quick, lambda: view.upload(bytes(content), invert)))

    async def _run(self, limiter: anyio.CapacityLimiter, work: Callable[[], Any]) -> Any:
        """Do work on a thread; what is slow waits for what is slow, and never holds up the rest."""
        if self._waiting >= WAITING:
            raise HTTPException(503, "too many questions at once: ask again in a moment.", {"retry-after": "1"})
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(work, limiter=limiter)
        finally:
            self._waiting -= 1

    def _images(self) -> ImagesView | None:
        return next((view for view in self.views if isinstance(view, ImagesView)), None)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; BadCall where that cannot be."""
    if not host:
        raise BadCall("--host is empty; 0.0.0.0 listens everywhere.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except (OSError, OverflowError) as error:
        found.close()
        option = "--host" if isinstance(error, socket.gaierror) else "--port"
        reason = str(error).rstrip(".")
        raise BadCall(
            f"the server cannot listen on {host}, port {port}: {reason}. Choose another with {option}."
        ) from error
    return found


def run(explorer: Explorer, listening: socket.socket, host: str, token: str | None) -> None:
    """Serve until the process is interrupted."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Work on other threads cannot be stopped, and nothing is lost with it: files are put in place by rename.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + sig)

    config = uvicorn.Config(explorer.app(host, token), log_level="warning", access_log=False, server_header=False)
    Server(config).run(sockets=[listening])


def _static() -> dict[str, Callable[[], bytes]]:
    """Every file that a page may load, by its name; no name is ever taken as a path."""
    found: dict[str, Callable[[], bytes]] = {}
    root = files("dualform.view.explorer") / "static"
    for folder, prefix in ((root, ""), (root / "views", "views/")):
        for entry in folder.iterdir():
            if Path(entry.name).suffix in TYPES:
                found[prefix + entry.name] = entry.read_bytes
    try:
        plotly = files("plotly") / "package_data" / "plotly.min.js"
    except ModuleNotFoundError as error:
        message = "The explorer needs plotly, which is not installed: pip install 'dualform[view]'"
        raise MissingExtra(message) from error
    found["plotly.min.js"] = plotly.read_bytes
    return found


def _wants_json(request: Request) -> bool:
    return "application/json" in request.headers.get("accept", "") or request.query_params.get("format") == "json"


def _parameters(request: Request) -> Mapping[str, str]:
    """The parameters of an address, of several with one name the last; how it is to be told is none of them."""
    return {name: value for name, value in request.query_params.items() if name != "format"}


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code, headers=error.headers)


async def _bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


async def _problem(request: Request, error: Exception) -> Response:
    logger.error("a request failed: %s", request.url.path, exc_info=error)
    return JSONResponse({"error": "Something went wrong; the server's log has it."}, status_code=500)
