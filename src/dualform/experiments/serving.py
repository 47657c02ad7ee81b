"""`dualform serve`: the explorer on a memory, with the model and the images of its recipe."""

from __future__ import annotations

import secrets
import webbrowser
from pathlib import Path

import torch
from rich.console import Console

import dualform
from dualform.errors import DataMissing, MissingExtra
from dualform.experiments.asking.models import rebuilt_model, recipe_of
from dualform.view.explorer.guard import LOOPBACK
from dualform.view.explorer.server import Explorer, listen, run
from dualform.view.explorer.subject import ImageSubject, Subject

RESIDENT = 2 << 30  # bytes: the indexes of a few layers stay at hand


def serve(path: Path, host: str, port: int, browser: bool, console: Console) -> None:
    """Serve the explorer of a memory until the process is interrupted."""
    memory = dualform.open(path, resident=RESIDENT)
    memory.require_events()
    subject = Subject(memory, path.absolute().name, image_subject(memory, console))
    explorer = Explorer(subject)
    listening = listen(host, port)
    token = None if host in LOOPBACK else secrets.token_urlsafe(24)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    if token is not None:
        address += f"?token={token}"
        console.print("Other machines can reach this server. Who has the address with the token can ask the memory.")
    console.print(f"The explorer of {path} is at {address}   (Ctrl-C ends it)", soft_wrap=True)
    if browser:
        webbrowser.open(address)
    run(explorer, listening, host, token)


def image_subject(memory: dualform.Memory, console: Console) -> ImageSubject | None:
    """The model and the images of a memory's recipe; None, with a sentence, where there is none."""
    chosen = recipe_of(memory)
    if chosen is None:
        console.print("This memory names no recipe of dualform's, so there is only its overview.")
        return None
    try:
        data = chosen.load()
    except (DataMissing, MissingExtra) as error:
        console.print(f"{error}\nThere is only the overview of this memory.", soft_wrap=True)
        return None
    with torch.no_grad():
        model = rebuilt_model(memory, chosen.model, None)
    return ImageSubject(
        model=model,
        tasks=chosen.tasks,
        train=data.train,
        test=data.test,
        preprocess=chosen.preprocess,
        showcase=chosen.showcase,
    )
