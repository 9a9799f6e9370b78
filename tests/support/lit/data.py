# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
"""DataModules of small drawn data sets."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DrawnDigits(Dataset):
    def __init__(self, count, transform=None):
        generator = torch.Generator().manual_seed(7)
        self.labels = torch.randint(10, (count,), generator=generator)
        centers = torch.randn(10, 1, 12, 12, generator=generator)
        self.images = centers[self.labels] + 0.7 * torch.randn(count, 1, 12, 12, generator=generator)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return (self.transform(image) if self.transform else image), self.labels[index]


class DigitsData(pl.LightningDataModule):
    def __init__(self, data_dir: str = "./", batch_size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        DrawnDigits(1)  # a download

    def setup(self, stage: str):
        self.train_set, self.val_set = random_split(DrawnDigits(360), [280, 80])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


class Flipped:
    """An augmentation that draws from torch's generator, as torchvision's do."""

    def __call__(self, image):
        return image.flip(-1) if torch.rand(()) < 0.5 else image


class AugmentedDigits(DigitsData):
    def setup(self, stage: str):
        self.train_set, self.val_set = DrawnDigits(280, Flipped()), DrawnDigits(80)


def image_loaders(batch_size: int = 40):
    digits = DrawnDigits(320)
    return DataLoader(digits, batch_size=batch_size, shuffle=True), DataLoader(DrawnDigits(60), batch_size=batch_size)


class Photos(pl.LightningDataModule):
    """Images of three channels."""

    def __init__(self, batch_size=24):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(10, (264,), generator=generator)
        images = torch.randn(10, 3, 16, 16, generator=generator)[labels] + torch.randn(
            264, 3, 16, 16, generator=generator
        )
        self.sets = [TensorDataset(images[:200], labels[:200]), TensorDataset(images[200:], labels[200:])]

    def train_dataloader(self):
        return DataLoader(self.sets[0], batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.sets[1], batch_size=self.batch_size)


class Texts(Dataset):
    """Token ids of sentences that are padded to one length, as tokenizers give them."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 13, (count, 1), generator=generator)
        ids = torch.randint(1, 50, (count, 12), generator=generator)
        self.mask = (torch.arange(12) < lengths).long()
        self.ids = ids * self.mask
        self.labels = (self.ids > 25).sum(1) * 2 > lengths[:, 0]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index].long()}


class TextData(pl.LightningDataModule):
    def __init__(self, max_seq_length: int = 12, train_batch_size: int = 32):
        super().__init__()
        self.train_batch_size = train_batch_size

    def setup(self, stage: str):
        self.dataset = {"train": Texts(240, 1), "validation": Texts(70, 2)}

    def train_dataloader(self):
        return DataLoader(self.dataset["train"], batch_size=self.train_batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset["validation"], batch_size=self.train_batch_size)


class PaddedTextData(TextData):
    """Sentences that are padded to the longest of a batch."""

    def loader(self, name):
        return DataLoader(Sentences(self.dataset[name]), batch_size=self.train_batch_size, collate_fn=padded)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("validation")


class Sentences(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        row = self.texts[index]
        return row["input_ids"][: row["attention_mask"].sum()], row["labels"]


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.stack([label for _, label in rows]),
    }


class TokenData(TextData):
    """The next token of each, -100 where there is none: the mean of the loss is one over tokens."""

    def setup(self, stage: str):
        self.dataset = {
            name: NextTokens(Texts(count, seed)) for name, count, seed in (("train", 240, 1), ("validation", 70, 2))
        }


class NextTokens(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        ids, mask = self.texts.ids[index], self.texts.mask[index]
        return ids[:-1], ids[1:].masked_fill(mask[1:] == 0, -100)


def regression_loaders(batch_size: int = 25):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(290, 6, generator=generator)
    y = x @ torch.randn(6, generator=generator) + 0.1 * torch.randn(290, generator=generator)
    sets = TensorDataset(x[:230], y[:230, None]), TensorDataset(x[230:], y[230:, None])
    return DataLoader(sets[0], batch_size=batch_size, shuffle=True), DataLoader(sets[1], batch_size=batch_size)


def label_set_loaders(batch_size: int = 30):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(300, 10, generator=generator)
    y = (x @ torch.randn(10, 4, generator=generator) > 0.5).float()
    sets = TensorDataset(x[:240], y[:240]), TensorDataset(x[240:], y[240:])
    return DataLoader(sets[0], batch_size=batch_size, shuffle=True), DataLoader(sets[1], batch_size=batch_size)
