"""The style sheet of the pages, light or dark as the reader's system is."""

# Shades of a token's background, shade0 to shade20.
SHADES = 20

STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5b6675; --line: #d5dbe3; --paper: #ffffff; --card: #f5f7fa;
  --a: #2563b8; --b: #d9730d; --error: #c0262d; --warning: #b26a00; --note: #0f766e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --soft: #9aa6b5; --line: #38424f; --paper: #14181e;
  --card: #1d232b; --a: #6ea8fe; --b: #f5a34b; --error: #ff7b7f; --warning: #f0b64a;
  --note: #4fd1c5; --good: #56d364; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.of { color: var(--soft); margin-top: .2rem; overflow-wrap: anywhere; }
.charts { display: flex; flex-wrap: wrap; gap: 14px; } figure { margin: 0; flex: 1 1 440px; min-width: 0;
  max-width: 490px; } figure.wide { flex-basis: 100%; max-width: 100%; }
figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 10.5px; fill: var(--soft); }
svg text.small { font-size: 9px; } .grid { stroke: var(--line); stroke-width: .6; }
.frame { fill: none; stroke: var(--line); } .mark { stroke: var(--soft); stroke-dasharray: 4 3; stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; } .line.a { stroke: var(--a); } .line.b { stroke: var(--b); }
.line.thin { stroke-dasharray: 2 2; stroke-width: 1.3; } .dot.a, .bar.a { fill: var(--a); }
.dot.b, .bar.b { fill: var(--b); } .dot { fill-opacity: .85; } .bar { fill-opacity: .75; } .cell { fill: var(--a); }
.bar.hollow { fill-opacity: 0; stroke: var(--b); stroke-width: 1.4; }
.key { font-weight: 400; color: var(--soft); margin-left: 12px; } .key::before { content: ""; display: inline-block;
  width: 12px; height: 3px; margin-right: 5px; vertical-align: middle; background: var(--soft); }
.key.a::before { background: var(--a); } .key.b::before { background: var(--b); } .key.thin::before { opacity: .5; }
table { border-collapse: collapse; font-size: .87rem; margin: .5rem 0; }
th, td { padding: .22rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.text, th.text { text-align: left; }
.wide { overflow-x: auto; } .card { background: var(--card); border-left: 5px solid var(--soft); padding: .6rem 1rem;
  margin: .7rem 0; border-radius: 4px; } .card ul { margin: .3rem 0; padding-left: 1.2rem; color: var(--soft); }
.card.error { border-color: var(--error); } .card.warning { border-color: var(--warning); }
.card.note { border-color: var(--note); } .card.good { border-color: var(--good); }
.context { font-family: ui-monospace, monospace; font-size: .82rem; overflow-wrap: anywhere; }
.context span { padding: 1px 2px; border-radius: 2px; white-space: pre-wrap; }
.context span.at { outline: 2px solid var(--error); } details { margin: 1rem 0; } summary { cursor: pointer; }
tr.best td.text { font-weight: 600; }
""" + "".join(
    f".shade{i} {{ background: color-mix(in srgb, var(--error) {50 * i // SHADES}%, transparent); }}\n"
    for i in range(SHADES + 1)
)
