"""One fuzzed request, how it is kept in the corpus, and what came of it."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes to send, and the place that they go to."""

    target: str
    name: str  # a route, a method, a service or a kind of script
    payload: bytes

    def save(self, folder: Path, why: str) -> Path:
        """Writes the case to a corpus."""
        digest = hashlib.sha256(self.payload).hexdigest()[:12]
        place = self.name.strip("/").replace("/", "-").rpartition(".")[2]
        path = folder / f"{self.target}-{place}-{digest}.json"
        kept: dict[str, str] = {"target": self.target, "name": self.name, "why": why}
        try:
            kept["text"] = self.payload.decode()
        except UnicodeDecodeError:
            kept["base64"] = base64.b64encode(self.payload).decode()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
        return path


def load(folder: Path) -> Iterator[Case]:
    """All cases of a corpus, in the order of their names."""
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text())
        text, coded = kept.get("text"), kept.get("base64")
        payload = base64.b64decode(coded) if text is None else text.encode()
        yield Case(kept["target"], kept["name"], payload)


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The status of an answer, and what is wrong with it; empty if nothing is."""

    status: str
    problem: str = ""
    was_lost: bool = False  # no answer: the process may have ended
