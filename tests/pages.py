"""What an HTML page is made of."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what the tests ask about; fails on tags that do not nest."""

    void = {"meta", "br", "wbr"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), f"an attribute of <{tag}> is given twice"
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> closes itself outside of SVG"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def fetched(self) -> list[str | None]:
        """Every address that a browser would fetch."""
        found = [value for _, given in self.tags for name, value in given.items() if name in ("src", "href")]
        return [address for address in found if not str(address).startswith("#")]
