"""Leave one out: the last item of each user is held out, and looked for among all items."""

from typing import NamedTuple

import numpy as np
from criteo import UserError
from interactions import Interactions

TOP = 10  # how many candidates are retrieved
MAX_QUESTIONS = 10_000  # users who are asked about, drawn at random where there are more
QUESTIONS_AT_A_TIME = 256  # bounds the memory for scores


class Questions(NamedTuple):
    """What a retrieval is asked: which candidate comes next for each user.

    Attributes:
        users: uint64[n].
        answers: int64[n], the candidate that was held out; -1 where it is none.
        seen: of each user, the candidates of the training part; they are not retrieved again.
        candidates: uint64[m], sorted: every item of the training part.
        counts: int64[m], how often each of them is in the training part.
    """

    users: np.ndarray
    answers: np.ndarray
    seen: list[np.ndarray]
    candidates: np.ndarray
    counts: np.ndarray


def leave_one_out(log: Interactions, seed: int) -> tuple[Interactions, Questions]:
    """Returns the training part, and the questions about the rest.

    Raises:
        UserError: if no user has two items.
    """
    _, from_the_end, items = np.unique(log.users[::-1], return_index=True, return_counts=True)
    last = len(log.users) - 1 - from_the_end[items > 1]
    if not last.size:
        raise UserError("no user has two different items, so none can be held out")
    training = Interactions(*(np.delete(keys, last) for keys in log))
    if last.size > MAX_QUESTIONS:
        last = np.random.default_rng(seed).choice(last, MAX_QUESTIONS, replace=False)
    candidates, taken, counts = np.unique(training.items, return_inverse=True, return_counts=True)
    by_user = np.argsort(training.users, kind="stable")
    users, ordered = log.users[last], training.users[by_user]
    bounds = zip(
        *(np.searchsorted(ordered, users, side) for side in ("left", "right")), strict=True
    )
    seen = [taken[by_user[first:behind]] for first, behind in bounds]
    place = np.minimum(np.searchsorted(candidates, log.items[last]), len(candidates) - 1)
    answers = np.where(candidates[place] == log.items[last], place, -1)
    return training, Questions(users, answers, seen, candidates, counts)


def recall(questions: Questions, users: np.ndarray, items: np.ndarray) -> float:
    """Returns the share of users whose answer is among the TOP candidates of highest score.

    Scores are dot products. Of candidates that tie for the last places, each has the same chance.

    Args:
        questions: what is asked.
        users: float32[n, dim], the vectors of the users.
        items: float32[m, dim], the vectors of the candidates.
    """
    found = 0.0
    for first in range(0, len(users), QUESTIONS_AT_A_TIME):
        part = slice(first, first + QUESTIONS_AT_A_TIME)
        scores = users[part] @ items.T
        for row, seen in zip(scores, questions.seen[part], strict=True):
            row[seen] = -np.inf
        answers = questions.answers[part]
        own = np.take_along_axis(scores, answers[:, None], axis=1)
        above, equal = (scores > own).sum(axis=1), (scores == own).sum(axis=1)
        chances = np.clip((TOP - above) / equal, 0, 1)
        found += chances[answers >= 0].sum()
    return float(found / len(users))


def popularity_recall(questions: Questions) -> float:
    """Returns the recall of whoever retrieves what most users took."""
    counts = questions.counts[:, None].astype(np.float32)
    return recall(questions, np.ones((len(questions.users), 1), np.float32), counts)
