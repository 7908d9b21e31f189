"""Pictures of a run's report in a headless Chromium, for docs/inspect.md.

    python bench/report_pictures.py RUN [--out docs]    report-390-dark.png and three more

Needs Debian's chromium and Pillow (matplotlib brings it). Widths of a phone and of a screen, light
and dark; the pictures are the first screens of the page, with few colours, so that they stay small.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from rloo_cli.inspection.report import make_report

WIDTHS = {390: 2400, 1280: 1900}  # pixels of width -> of height that is shown
COLOURS = 96
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=8000",
)  # fmt: skip
# A headless Chromium has no window narrower than 500: the page lies in a frame of its width.
FRAME = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="{scheme}">
<style>body{{margin:0}}iframe{{border:0;width:{width}px;height:{height}px;color-scheme:{scheme}}}
</style><iframe srcdoc='{page}'></iframe>"""


def take_picture(page: str, width: int, height: int, dark: bool, out: Path) -> None:
    """One picture of a page, as a PNG of few colours."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("apt-get install chromium")
    scheme = "dark" if dark else "light"
    with tempfile.TemporaryDirectory() as root:
        text = page.replace("&", "&amp;").replace("'", "&#39;")
        frame = FRAME.format(page=text, width=width, height=height, scheme=scheme)
        (Path(root) / "page.html").write_text(frame)
        picture = Path(root) / "picture.png"
        command = [
            chromium, *FLAGS, f"--user-data-dir={root}/profile", f"--screenshot={picture}",
            f"--window-size={max(width, 500)},{height}", 
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            (Path(root) / "page.html").as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if not picture.exists():
            sys.exit(done.stderr[-2000:])
        image = Image.open(picture).convert("RGB").crop((0, 0, width, height))
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    page, _ = make_report(options.run)
    for width, height in WIDTHS.items():
        for dark in (False, True):
            name = f"report-{width}-{'dark' if dark else 'light'}.png"
            take_picture(page, width, height, dark, options.out / name)


if __name__ == "__main__":
    main()
