"""The explorer's server: its numbers are the library's, and it answers nobody and nothing else."""

from __future__ import annotations

import base64
import copy
import io
import random
import string
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import dualform
import tiny
from dualform.errors import BadCall
from dualform.queries.groupfolds import GroupFolds
from dualform.view.explorer import answers as answers_module
from dualform.view.explorer import server as module
from dualform.view.explorer.guard import hosts_of
from dualform.view.explorer.levers import pixels_text
from dualform.view.explorer.models import Models
from dualform.view.explorer.server import Explorer, listen
from dualform.view.explorer.subject import ImageSubject, Subject

JSON = {"accept": "application/json"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
PHASE = 90
LAYERS = ["fc0", "fc1", "fc2"]


def ask(client: TestClient, address: str, **parameters: Any) -> dict[str, Any]:
    answer = client.get(address, params=parameters, headers=JSON)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: TestClient, address: str, **parameters: Any) -> str:
    answer = client.get(address, params=parameters, headers=JSON)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"])


def inputs(subject: Subject, task: int, index: int) -> torch.Tensor:
    images = subject.images
    assert images is not None
    place = images.test_place(task, index)
    return images.preprocess(images.test.images[place : place + 1], task)


def test_a_page_and_its_numbers_have_one_address(client: TestClient) -> None:
    home = client.get("/", follow_redirects=False)
    assert (home.status_code, home.headers["location"]) == (307, "/images")
    for name in ("images", "overview"):
        page = client.get(f"/{name}", headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html") and "/static/app.js" in page.text
        assert client.get(f"/{name}", headers=JSON).headers["content-type"] == "application/json"
        assert client.get(f"/{name}?format=json").json().keys() == client.get(f"/{name}", headers=JSON).json().keys()
    about = client.get("/about.json").json()
    assert [view["name"] for view in about["views"]] == ["images", "overview"]
    assert about["images"]["steps"] == 2 * PHASE


@pytest.mark.parametrize("task, index", [(0, 4), (1, 17)])
def test_spotlights_are_the_librarys(client: TestClient, subject: Subject, task: int, index: int) -> None:
    images, memory = subject.images, subject.memory
    assert images is not None
    found = ask(client, "/images", test=index, task=images.tasks[task].name)
    spotlight = memory.attend(images.model, inputs(subject, task, index))
    logits = images.model(inputs(subject, task, index))[0]
    assert found["prediction"]["answer"] == int(logits.argmax())
    assert found["prediction"]["logits"] == pytest.approx(logits.tolist(), rel=1e-6)
    assert found["prediction"]["class_name"] == images.tasks[task].class_names[int(logits.argmax())]
    assert [layer["layer"] for layer in found["layers"]] == LAYERS
    for layer in found["layers"]:
        attention = spotlight[layer["layer"]]
        every = attention.top(memory.events(0, memory.steps))
        best: dict[int, float] = {}
        for example, score in zip(every.examples[0].tolist(), every.scores[0].tolist(), strict=True):
            best.setdefault(example, score)
        assert {one["example"]: one["score"] for one in layer["matches"]} == dict(list(best.items())[:8])
        labels, tasks = images.train.labels[every.examples[0]], images.train.tasks[every.examples[0]]
        for total, (of, label) in zip(layer["totals"], images.groups, strict=True):
            scores = every.scores[0][(labels == label) & (tasks == of)].double()
            assert total == pytest.approx(float(scores.abs().sum()), rel=1e-6)


def test_the_other_charts(client: TestClient, subject: Subject) -> None:
    spotlight = subject.memory.attend(subject.images.model, inputs(subject, 0, 4))  # type: ignore[union-attr]
    found = ask(client, "/images", test=4, part="scores")
    for layer in found["layers"]:
        top = spotlight[layer["layer"]].top(500, within=("task", "label"))
        groups = list(top.groups or ())
        for one, (task, label) in zip(layer["classes"], subject.images.groups, strict=True):  # type: ignore[union-attr]
            at = groups.index((tiny.TWO.tasks[task].name, label))
            kept = top.events[0, at] >= 0
            assert one["scores"] == top.scores[0, at][kept].tolist()
            assert one["examples"] == top.examples[0, at][kept].tolist()
    found = ask(client, "/images", test=4, part="timeline")
    for layer in found["layers"]:
        expected = spotlight[layer["layer"]].timeline(40, absolute=True)
        assert layer["values"] == pytest.approx(expected.values[0].tolist())
        assert layer["edges"] == expected.edges.tolist()


LEVERS: list[dict[str, Any]] = [
    {"until": 60},
    {"without": "turned"},
    {"without": "upright:3,turned:0"},
    {"until": 130, "without": "turned"},
    {"until": 130, "without": "turned:2"},
    {"until": 130, "without": "upright,turned:4,turned:5"},
]


@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_levers_set_the_model_and_the_events(client: TestClient, subject: Subject, levers: dict[str, Any]) -> None:
    images, memory = subject.images, subject.memory
    assert images is not None
    without = set()
    for item in filter(None, str(levers.get("without", "")).split(",")):
        name, _, label = item.partition(":")
        task = [one.name for one in images.tasks].index(name)
        without |= {(task, int(label))} if label else {(task, n) for n in range(10)}
    kept = ~images.of_groups(without)
    until = levers.get("until")
    model = memory.dual(images.model, where={"example": kept}, until=until)
    found = ask(client, "/images", test=4, **levers)
    logits = model(inputs(subject, 0, 4))[0]
    assert found["prediction"]["logits"] == pytest.approx(logits.tolist(), rel=1e-5, abs=1e-5)
    for layer in found["layers"]:
        for match in layer["matches"]:
            assert bool(kept[match["example"]])
            assert match["step"] <= (until or memory.steps)
        for total, group in zip(layer["totals"], images.groups, strict=True):
            assert (total == 0.0) == (group in without or (until is not None and until <= PHASE and group[0] == 1))


@pytest.mark.parametrize("levers", [{"unit": 3}, {"unit": 3, "against": 5}, {}, {"unit": 3, "until": 100}], ids=str)
def test_contributions_in_the_last_layer(client: TestClient, subject: Subject, levers: dict[str, Any]) -> None:
    images, memory = subject.images, subject.memory
    assert images is not None
    until = levers.get("until")
    model = images.model if until is None else memory.dual(images.model, until=until)
    found = ask(client, "/images", test=4, measure="contributions", **levers)["layers"][-1]
    attention = memory.attend(images.model, inputs(subject, 0, 4), until=until)["fc2"]
    answer = int(model(inputs(subject, 0, 4))[0].argmax())
    direction = torch.zeros(10, dtype=torch.float64)
    direction[levers.get("unit", answer)] = 1
    if "against" in levers:
        direction[levers["against"]] = -1
    asked = attention.contributions(direction=direction)
    best = asked.top(8, by=None)
    assert found["matches"][0]["score"] == pytest.approx(best.scores[0, 0].item(), rel=1e-4)
    totals = asked.totals(by=("task", "label"))
    expected = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    names = [(images.tasks[task].name, label) for task, label in images.groups]
    assert found["totals"] == pytest.approx([expected[name] for name in names], rel=1e-4, abs=1e-6)
    assert found["measure"].startswith("adds to")


def test_drawn_pixels_are_asked_about(client: TestClient, subject: Subject) -> None:
    images = subject.images
    assert images is not None
    pixels = images.test.images[7]
    found = ask(client, "/images", pixels=pixels_text(pixels))
    assert ask(client, "/images", pixels=pixels_text(pixels), mode="upload") == found  # which tab is open is no lever
    assert found["input"] == found["input"] | {"title": "your image", "index": None, "pixels": pixels_text(pixels)}
    assert found["prediction"]["label"] is None
    expected = images.model(images.preprocess(pixels[None], 0))[0].tolist()
    assert found["prediction"]["logits"] == pytest.approx(expected, rel=1e-6)


def test_before_the_first_step_there_is_only_a_prediction(client: TestClient, subject: Subject) -> None:
    found = ask(client, "/images", test=4, until=0)
    model = subject.memory.dual(subject.images.model, until=0)  # type: ignore[union-attr]
    assert found["layers"] == []
    assert found["prediction"]["logits"] == pytest.approx(model(inputs(subject, 0, 4))[0].tolist(), rel=1e-4)


def test_test_images_by_class_and_correctness(client: TestClient, subject: Subject) -> None:
    images = subject.images
    assert images is not None
    of_task = images.test.tasks == 1
    labels = images.test.labels[of_task]
    answers = images.model(images.preprocess(images.test.images[of_task], 1)).argmax(1)
    for right in ("yes", "no", ""):
        found = ask(client, "/images/examples.json", task="turned", label=4, right=right)
        chosen = labels == 4 if right == "" else (labels == 4) & ((labels == answers) == (right == "yes"))
        assert found["count"] == int(chosen.sum())
        assert [one["index"] for one in found["examples"]] == chosen.nonzero()[:60, 0].tolist()
    assert ask(client, "/images/examples.json", page=1)["examples"][0]["index"] == 60


def test_training_images_are_pictures(client: TestClient, subject: Subject) -> None:
    answer = client.get("/images/train/5.png")
    shown = torch.tensor(list(Image.open(io.BytesIO(answer.content)).tobytes()), dtype=torch.uint8)
    assert torch.equal(255 - shown, subject.images.train.images[5].reshape(-1))  # type: ignore[union-attr]
    assert answer.headers["cache-control"] == "no-cache"  # another run may be served here next
    for example in ("999999", "9" * 5000, "-1", "٣"):
        assert client.get(f"/images/train/{example}.png").status_code == 400


def overview(client: TestClient) -> dict[str, Any]:
    """The overview once all is measured."""
    for _ in range(600):
        found = ask(client, "/overview")
        if not found["measuring"]:
            break
        threading.Event().wait(0.1)
    return found


def test_the_overview_says_how_exact_the_memory_is(client: TestClient, subject: Subject) -> None:
    found = overview(client)
    assert not found["measuring"] and found["problem"] == ""
    certificate = subject.memory.certificate()
    assert [row["residual"] for row in found["certificate"]] == [row.residual for row in certificate]
    assert found["sentences"][0].startswith("fc0.weight is rebuilt from 23,040 events to ")
    accuracy = found["accuracy"]
    assert accuracy["steps"][0] == 0 and accuracy["steps"][-1] == 2 * PHASE and len(accuracy["steps"]) == 21
    images = subject.images
    assert images is not None
    inputs_of = images.preprocess(images.test.images[images.test.tasks == 1], 1)
    right = images.model(inputs_of).argmax(1) == images.test.labels[images.test.tasks == 1]
    assert accuracy["Turned"][-1] == pytest.approx(100 * float(right.double().mean()))


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"test": "360"}, "test is a whole number from 0 to 359"),
        ({"test": "-1"}, "test is a whole number"),
        ({"test": "1e3"}, "test is a whole number"),
        ({"until": "181"}, "until is a whole number from 0 to 180"),
        ({"task": "cifar"}, "task is one of upright, turned"),
        ({"pixels": "AAAA"}, "64 are expected"),
        ({"pixels": "*"}, "pixels is not base64"),
        ({"pixels": "AAAA", "test": "1"}, "give test or pixels"),
        ({"without": "upright,turned"}, "leaves no event at all"),
        ({"without": "turned:10"}, "without names tasks"),
        ({"without": "../../etc/passwd"}, "without names tasks"),
        ({"without": "turned:0000003"}, "without names tasks"),
        ({"without": ",".join("0" * 41)}, "without names 41 classes; there are 20"),
        ({"measure": "causes"}, "measure is one of"),
        ({"unit": "10", "measure": "contributions"}, "unit is a whole number from 0 to 9"),
        ({"unit": "3", "against": "3", "measure": "contributions"}, "two different outputs"),
        ({"part": "all"}, "part is one of"),
        ({"color": "red"}, "there is no parameter 'color'"),
    ],
    ids=str,
)
def test_bad_parameters_are_explained(client: TestClient, parameters: dict[str, str], message: str) -> None:
    assert message in refused(client, "/images", **parameters)


def test_uploads_are_decoded_with_care(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    Image.new("L", (40, 40), 0).save(content, "PNG")
    found = client.post("/images/upload", content=content.getvalue())
    assert found.status_code == 200
    assert base64.b64decode(found.json()["pixels"], altchars=b"-_") == bytes(64)
    assert "cannot be read as an image" in client.post("/images/upload", content=b"GIF89a not").json()["error"]
    assert client.post("/images/upload", content=b"").status_code == 400
    monkeypatch.setattr(module, "UPLOAD", 1000)
    assert client.post("/images/upload", content=bytes(2000)).status_code == 413
    bomb = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(bomb, "PNG")
    monkeypatch.setattr(module, "UPLOAD", 1 << 20)
    answer = client.post("/images/upload", content=bomb.getvalue())
    assert answer.status_code == 400 and "144,000,000" not in answer.text and "pixels" in answer.text


NOT_OURS = [
    "/static/../server.py",
    "/static/%2e%2e/server.py",
    "/static/..%2f..%2fapi.py",
    "/static/views/../../server.py",
    "/static//etc/passwd",
    "/static/index.html%00.js",
    "/static/",
    "/../../manifest-r000.json",
    "/images/train/../../x.png",
    "/images/train/-1.png",
    "/images/train/1.0.png",
    "/nothing",
]


@pytest.mark.parametrize("address", NOT_OURS)
def test_no_other_file_can_be_read(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code in (400, 404, 405)
    assert "import" not in answer.text and "root:" not in answer.text


def test_only_our_own_pages_may_ask(explorer: Explorer) -> None:
    app = explorer.app()
    strangers: list[tuple[str, dict[str, str]]] = [
        ("http://evil.example", {}),
        ("http://127.0.0.1.evil.example:8765", {}),
        ("http://127.0.0.1:8765", {"origin": "http://evil.example"}),
        ("http://127.0.0.1:8765", {"origin": "null"}),
        ("http://127.0.0.1:8765", {"origin": "http://127.0.0.1:9999"}),
        ("http://127.0.0.1:8765", {"origin": "http://["}),
        ("http://127.0.0.1:8765", {"sec-fetch-site": "cross-site"}),
        ("http://127.0.0.1:8765", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}),
        ("http://127.0.0.1:8765", LINK | {"sec-fetch-dest": "iframe"}),
    ]
    for base, headers in strangers:
        answer = TestClient(app, base_url=base).get("/about.json", headers=headers)
        assert answer.status_code == 403 and "Refused" in answer.json()["error"]
    ours = TestClient(app, base_url="http://localhost:8765").get(
        "/about.json", headers={"origin": "http://localhost:8765"}
    )
    assert ours.status_code == 200
    assert "default-src 'self'" in ours.headers["content-security-policy"]
    assert ours.headers["x-content-type-options"] == "nosniff"
    assert hosts_of("0.0.0.0") is None and "192.0.2.7" in (hosts_of("192.0.2.7") or ())
    # A link in a mail or a notebook may be followed, but not posted to.
    browser = TestClient(app, base_url="http://localhost:8765")
    assert browser.get("/images?test=3", headers=LINK).status_code == 200
    assert browser.post("/images/upload", headers=LINK).status_code == 403
    named = TestClient(explorer.app("MyMachine"), base_url="http://mymachine:8765")
    assert named.get("/about.json").status_code == 200


def test_elsewhere_a_token_is_needed(explorer: Explorer) -> None:
    client = TestClient(explorer.app("0.0.0.0", "secret-token"), base_url="http://192.0.2.7:8765")
    assert client.get("/about.json").status_code == 403
    assert client.get("/about.json?token=wrong").status_code == 403
    assert client.get("/about.json", headers={"cookie": "dualform_token_8765=wrong"}).status_code == 403
    first = client.get("/images?test=3&token=secret-token&until=50", follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == "/images?test=3&until=50"
    assert "httponly" in first.headers["set-cookie"].lower() and "samesite=lax" in first.headers["set-cookie"].lower()
    assert client.get("/about.json").status_code == 200  # with the cookie


@pytest.mark.parametrize("other", ['prefs={"a":1}', "flag", "a@b=1", "k[0]=1", "x=a b", "dualform_token_80=else"])
def test_cookies_of_other_pages_do_not_matter(explorer: Explorer, other: str) -> None:
    client = TestClient(explorer.app("0.0.0.0", "secret-token"), base_url="http://192.0.2.7:8765")
    headers = {"cookie": f"{other}; dualform_token_8765=secret-token"}
    assert client.get("/about.json", headers=headers).status_code == 200


def test_a_slow_question_does_not_hold_up_others(
    explorer: Explorer, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    models = explorer.views[0]._answers.models  # type: ignore[attr-defined]
    made = models._weights

    def slow(levers: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return made(levers)

    monkeypatch.setattr(models, "_weights", slow)
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(client.get("/images?until=77", headers=JSON).status_code))
    waiting.start()
    assert begun.wait(30)
    for index in range(5):
        assert ask(client, "/images", test=index)["layers"]
    assert answers == []
    go_on.set()
    waiting.join(30)
    assert answers == [200]


def test_questions_at_the_same_time_do_not_see_each_other(
    client: TestClient, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one image is asked about, the same model answers about another, and is copied."""
    images = subject.images
    assert images is not None
    expected = ask(client, "/images", test=3)
    attend, between = answers_module.attend, []

    def disturbed(memory: Any, model: torch.nn.Module, *arguments: Any) -> Any:
        def other(*_: Any) -> None:
            handle.remove()
            between.append(images.model(inputs(subject, 1, 5)))
            copied = copy.deepcopy(images.model)
            assert not any(one._forward_hooks or one._forward_pre_hooks for one in copied.modules())

        handle = model.register_forward_pre_hook(other)
        return attend(memory, model, *arguments)

    monkeypatch.setattr(answers_module, "attend", disturbed)
    assert ask(client, "/images", test=3) == expected
    assert len(between) == 1


def test_what_sums_all_events_is_slow(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    view = explorer.views[0]
    assert not view.is_slow({}) and view.is_slow({"part": "scores"}) and view.is_slow({"until": "33"})
    monkeypatch.setattr(GroupFolds, "at_hand", True)
    assert not view.is_slow({"measure": "contributions"})
    monkeypatch.setattr(Models, "has", lambda *_: True)
    assert view.is_slow({"measure": "contributions", "until": "33"})
    monkeypatch.setattr(GroupFolds, "at_hand", False)
    assert view.is_slow({"measure": "contributions"})


def test_a_memory_without_exact_values_has_scores_and_a_certificate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, model = tiny.ONE.load(), tiny.ONE.model()
    optimizer = torch.optim.Adam(model.parameters())
    columns = {"label": data.train.labels}
    with dualform.record(model, optimizer, tmp_path / "run", examples=columns, recipe="tiny") as recorder:
        for ids in torch.arange(len(data.train))[:96].split(32):
            with recorder.batch(ids):
                outputs = model(tiny.ONE.preprocess(data.train.images[ids], 0))
                torch.nn.functional.cross_entropy(outputs, data.train.labels[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    images = ImageSubject(model, tiny.ONE.tasks, data.train, data.test, tiny.ONE.preprocess)
    app = Explorer(Subject(memory, "adam", images)).app()
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as client:
        assert client.get("/about.json").json()["images"]["masks"] is False
        assert ask(client, "/images", test=4)["layers"]
        found = overview(client)
        assert found["problem"] == "" and found["accuracy"]["steps"] == []
        assert "has no exact values: Adam" in found["sentences"][0]


def test_too_many_questions_are_turned_away(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 0)
    answer = client.get("/images", headers=JSON)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_a_failure_shows_no_traceback(client: TestClient, explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(explorer.views[0], "data", fail)
    answer = client.get("/images", headers=JSON)
    assert answer.status_code == 500
    assert "Traceback" not in answer.text and "secret" not in answer.text


HOSTILE = ["", "0", "-1", "1" * 400, "NaN", "null", "../..", "%00", "<script>", "'; DROP", "٣", "1e9", "🙂" * 20,
           "a" * 3000, "upright", "turned:3", "3,4,5", "scores", "contributions", "60", "AAAA", "A" * 88]  # fmt: skip


def test_a_fuzz_of_every_route(client: TestClient) -> None:
    chance = random.Random(0)
    names = ["test", "task", "pixels", "until", "without", "measure", "unit", "against", "part", "page", "label",
             "right", "format", "token", "x" * 50]  # fmt: skip
    routes = ["/", "/images", "/overview", "/about.json", "/images/examples.json", "/images/upload",
              "/images/train/{}.png", "/static/{}", "/{}"]  # fmt: skip
    for _ in range(400):
        value = lambda: chance.choice([*HOSTILE, "".join(chance.choices(string.printable, k=chance.randint(0, 40)))])  # noqa: E731
        address = chance.choice(routes).replace(
            "{}", chance.choice(["1", "x", "-1", "9" * 30, "..", "app.js", "%2e%2e"])
        )
        parameters = [(chance.choice(names), value()) for _ in range(chance.randint(0, 4))]
        method = chance.choice(["GET", "GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
        body = chance.randbytes(chance.randint(0, 3000)) if method in ("POST", "PUT") else None
        headers = JSON | ({"cookie": value().encode("ascii", "ignore").decode()} if chance.random() < 0.2 else {})
        headers = {name: text.replace("\n", "").replace("\r", "") for name, text in headers.items()}
        answer = client.request(method, address, params=parameters, content=body, headers=headers)
        assert answer.status_code < 500, (method, address, parameters, answer.text)
        assert "Traceback" not in answer.text and "/site-packages/" not in answer.text


def test_a_port_that_is_taken_is_told(path: Path) -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(BadCall, match=r"cannot listen .* --port"):
        listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(BadCall, match="cannot listen"):
        listen("127.0.0.1", 99999)
