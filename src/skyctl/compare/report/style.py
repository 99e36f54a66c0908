"""The report's look: one style sheet, light and dark, from a phone's width up, and on paper."""

from __future__ import annotations

# Data colours are Okabe and Ito's, told apart by colour-blind eyes; those for the dark are lightened.
_LIGHT = """
  --ground:#fafaf7; --paper:#ffffff; --ink:#1c1f24; --muted:#5b626d; --line:#e3e4df; --faint:#f1f1ec;
  --grid:#e9e9e4; --idle:#c3c6c9; --accent:#00598b; --good:#00724f; --bad:#a13f00;
  --predicted:#56b4e9; --measured:#d55e00; --bound:#1c1f24;
  --even:#7b8088; --heuristic:#b8588f; --optimal:#00876c; --other0:#e69f00; --other1:#0072b2;
  --f:#0072b2; --on-f:#ffffff; --b:#e69f00; --on-b:#1c1f24; --w:#009e73; --on-w:#ffffff; --o:#cc79a7;
  --c:#882255; --s:#a9adb3; --wait:#e9e9e4; --net:#f0e442;
"""
_DARK = """
  --ground:#131519; --paper:#1a1d22; --ink:#e9e9e5; --muted:#a0a7b1; --line:#2d3138; --faint:#22262c;
  --grid:#2a2e35; --idle:#4c525b; --accent:#7cc4f0; --good:#4fd0a6; --bad:#f2935a;
  --predicted:#56b4e9; --measured:#f07a2e; --bound:#f4f4f0;
  --even:#a2a8b1; --heuristic:#e08fbc; --optimal:#35c69c; --other0:#e9b13b; --other1:#4aa3dc;
  --f:#3d97d3; --on-f:#0c0e11; --b:#e9ab2e; --on-b:#14161a; --w:#2fbd92; --on-w:#0c0e11; --o:#d995bb;
  --c:#c0628f; --s:#717780; --wait:#262a31; --net:#d8cd3a;
"""

_BASE = """
*,*::before,*::after{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 Inter,system-ui,-apple-system,
  "Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;
  overflow-wrap:break-word}
header,main,footer{max-width:70rem;margin:0 auto;padding:0 2rem}
header{padding-top:3.5rem}
.eyebrow{margin:0 0 1rem;color:var(--muted);font-size:.875rem}
h1{margin:0 0 1.25rem;font-size:clamp(1.65rem,4.2vw,2.6rem);line-height:1.16;font-weight:650;
  letter-spacing:-.022em;max-width:24em;text-wrap:balance}
h2{margin:0 0 .35rem;font-size:1.35rem;line-height:1.25;font-weight:650;letter-spacing:-.012em}
h3{margin:0;font-size:1rem;font-weight:650}
p{margin:0 0 1rem;max-width:46rem}
.lead{color:var(--muted);margin-bottom:1.6rem}
small,.small{font-size:.8125rem}
.muted,small{color:var(--muted)}
code,pre{font:.875em/1.5 ui-monospace,"SF Mono","Cascadia Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
a{color:var(--accent);text-underline-offset:.18em;text-decoration-thickness:1px}
a:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:3px}
nav{margin:2.2rem 0 0;padding:.7rem 0;border-block:1px solid var(--line)}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.5rem;margin:0;padding:0;list-style:none;font-size:.9375rem}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
section{padding-top:3.6rem}
#verdict{padding-top:.5rem}
footer{padding-top:3rem;padding-bottom:4rem;color:var(--muted);font-size:.875rem}
"""

_PARTS = """
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:1px;margin:2rem 0 2.4rem;
  background:var(--paper);border:1px solid var(--line);border-radius:10px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--line);padding:1.05rem 1.25rem 1.15rem}
.tiles dt{color:var(--muted);font-size:.8125rem}
.tiles dd{margin:.1rem 0 0;font-size:1.7rem;line-height:1.25;font-weight:620;letter-spacing:-.02em}
.tiles dd small{display:block;font-size:.8125rem;font-weight:400;letter-spacing:0;line-height:1.45;
  margin-top:.15rem}
figure{margin:0 0 1.5rem;padding:1.35rem 1.5rem 1.1rem;background:var(--paper);border:1px solid var(--line);
  border-radius:10px;break-inside:avoid}
figure>header,.head{display:flex;flex-wrap:wrap;align-items:baseline;justify-content:space-between;
  gap:.15rem 1.5rem;max-width:none;margin:0 0 .8rem;padding:0}
.head>span{color:var(--muted);font-size:.875rem}
.head b,.said b{color:var(--ink);font-weight:620}
figcaption{margin-top:.75rem;color:var(--muted);font-size:.8125rem;max-width:52rem}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:1.5rem}
.pair>figure{min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.35rem;margin:0 0 .9rem;padding:0;list-style:none;
  color:var(--muted);font-size:.8125rem}
.legend li{display:flex;align-items:center;gap:.45rem}
.legend svg{width:22px;height:12px;flex:none}
.lanes{margin:0;padding:0;list-style:none;display:grid;gap:.5rem}
.lane,.axis-lane{display:grid;grid-template-columns:9.5rem minmax(0,1fr) 12rem;column-gap:1.1rem;
  align-items:center}
.lane>*{min-width:0}
.who{line-height:1.3}
.who b{font-weight:600;overflow-wrap:anywhere}
.who small,.num small{display:block;line-height:1.35}
.num{text-align:right;line-height:1.3}
.num b{font-weight:620}
.lane svg{display:block;width:100%;height:34px;overflow:visible}
.lane.thin svg{height:22px}
.axis-box{position:relative;grid-column:2}
.axis{display:block;width:100%;height:22px;overflow:visible}
.unit{display:block;text-align:right;color:var(--muted);font-size:.75rem;line-height:1.2}
svg text{font:12px/1 Inter,system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--muted)}
.axis line{stroke:var(--idle)}
.grid{stroke:var(--grid)}
.gantt{gap:2px}
.gantt+.axis-lane{margin-bottom:0}
.gantt .lane,.gantt-axis{grid-template-columns:9.5rem minmax(0,1fr);column-gap:1.1rem}
.gantt .who{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-size:.875rem}
.gantt .lane svg{height:22px}
.gantt.many{gap:0}
.gantt.many .lane svg{height:9px}
.gantt.many .who{font-size:.5625rem;line-height:9px}
.gantt svg text{font-size:10.5px;text-anchor:middle;pointer-events:none}
.panel{margin:.9rem 0 .35rem;color:var(--muted);font-size:.8125rem}
.panel b{color:var(--ink);font-weight:600}
.scroll{overflow-x:auto;margin:0 -.25rem;padding:0 .25rem}
table{border-collapse:collapse;width:100%;font-size:.875rem}
td{white-space:nowrap}
th,td{padding:.5rem .75rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:baseline}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--muted);font-weight:500;font-size:.8125rem;vertical-align:bottom}
tbody th{font-weight:600}
tbody tr:last-child>*{border-bottom:0}
td.text,th.text{text-align:left}
tr.best td,tr.best th{font-weight:640}
.heat{width:auto;border-spacing:3px;border-collapse:separate}
.heat th{border:0;font-weight:500;font-size:.8125rem;padding:.25rem .6rem .25rem 0}
.heat thead th{text-align:center;padding:.1rem .3rem .3rem}
.heat td{border:0;border-radius:5px;text-align:center;padding:.45rem .5rem;min-width:5.2rem;line-height:1.3}
.heat td.none{color:var(--muted)}
.heat small{color:inherit;opacity:.85;display:block}
.plot{padding-left:3.4rem}
.plot svg.field{display:block;width:100%;height:250px;overflow:visible}
.plot .axis-box{display:block}
.field .grid{vector-effect:non-scaling-stroke}
.curve{fill:none;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.certificate{border-left:3px solid var(--line);padding:.1rem 0 .1rem 1.1rem;margin:0 0 1.6rem}
.certificate.proved{border-color:var(--good)}
.certificate p{margin:.35rem 0}
.checks{margin:.4rem 0 0;padding:0;list-style:none;font-size:.875rem}
.checks li{padding-left:1.5rem;text-indent:-1.5rem;margin:.15rem 0}
.mark{display:inline-block;width:1.5rem;text-indent:0;color:var(--good);font-weight:700}
.mark.bad{color:var(--bad)}
.mark.open{color:var(--muted)}
pre{margin:0;padding:.8rem 1rem;background:var(--faint);border-radius:7px;overflow-x:auto;
  white-space:pre-wrap;overflow-wrap:anywhere}
.steps{margin:0 0 1.6rem;padding:0;list-style:none;display:grid;gap:1rem;max-width:56rem}
.steps p{margin:0 0 .35rem;font-size:.9375rem}
dl.facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.35rem 1.5rem;margin:0;
  font-size:.9375rem}
dl.facts dt{color:var(--muted)}
dl.facts dd{margin:0}
.said{margin:.6rem 0 0;padding-left:1.1rem;font-size:.9375rem}
.said li{margin:.15rem 0}
.empty{color:var(--muted)}
"""

_FILLS = """
.predicted{fill:var(--predicted)} .measured{fill:var(--measured)}
.ring{fill:var(--paper);stroke:var(--predicted);stroke-width:2.5}
.whisker{stroke:var(--ink);stroke-width:1.25} .whisker.on{stroke:var(--measured);stroke-width:2}
.cut{stroke:var(--paper);stroke-width:1;opacity:.85}
.hatched{fill:url(#hatch);stroke:none}
.hatch-line{stroke:var(--idle);stroke-width:1}
.end{stroke:var(--ink);stroke-width:2} .end.seen{stroke:var(--measured);stroke-dasharray:4 3}
.bound{stroke:var(--bound);stroke-width:1.5;stroke-dasharray:2 3}
.track{fill:var(--faint)}
.k-F{fill:var(--f)} .k-B{fill:var(--b)} .k-W{fill:var(--w)} .k-O{fill:var(--o)} .k-C{fill:var(--c)}
.k-S{fill:var(--s)} .k-idle{fill:var(--wait)} .k-transfer{fill:var(--net)}
svg text.on-F{fill:var(--on-f)} svg text.on-B{fill:var(--on-b)} svg text.on-W{fill:var(--on-w)}
""" + "".join(
    f".s-{name}{{stroke:var(--{name})}} .d-{name}{{fill:var(--{name})}} .h-{name}{{fill:var(--paper);"
    f"stroke:var(--{name});stroke-width:2}}\n"
    for name in ("even", "heuristic", "optimal", "other0", "other1")
)

_SMALL = """
@media (max-width:46rem){
  header,main,footer{padding-inline:1.1rem}
  header{padding-top:2rem}
  section{padding-top:2.6rem}
  #verdict{padding-top:0}
  figure{padding:1rem 1rem .9rem}
  .tiles{grid-template-columns:1fr 1fr}
  .tiles div{padding:.8rem .9rem}
  .tiles dd{font-size:1.35rem}
  .pair{grid-template-columns:minmax(0,1fr);gap:0}
  .lane{grid-template-columns:minmax(0,1fr) auto;row-gap:.2rem}
  .lanes:not(.gantt){gap:.95rem}
  .lane svg{grid-column:1/-1;grid-row:2}
  .axis-lane{grid-template-columns:minmax(0,1fr)}
  .axis-box{grid-column:1}
  .gantt .lane,.gantt-axis{grid-template-columns:4.2rem minmax(0,1fr);column-gap:.5rem}
  .gantt-axis .axis-box{grid-column:2}
  .gantt .lane svg{grid-column:2;grid-row:1}
  .gantt .who{font-size:.75rem}
  .gantt svg text{display:none}
  .plot{padding-left:2.9rem}
  .plot svg.field{height:210px}
  dl.facts{grid-template-columns:minmax(0,1fr);gap:0}
  dl.facts dd{margin-bottom:.55rem}
  th,td{padding:.45rem .5rem}
}
@media print{
  :root{color-scheme:light}
  body{background:#fff;font-size:11pt}
  nav{display:none}
  header,main,footer{max-width:none;padding-inline:0}
  section{padding-top:1.6rem}
  figure,.tiles,tr,.certificate{break-inside:avoid}
  h2,h3,.lead{break-after:avoid}
  *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""


def sheet() -> str:
    """The whole style sheet."""
    # On paper it is always light: ink on white, whatever the screen is set to.
    return (
        f":root{{color-scheme:light dark;{_LIGHT}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
        f"{_BASE}{_PARTS}{_FILLS}{_SMALL}"
    )
