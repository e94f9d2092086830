"""The style sheet of the pages, light or dark as the reader's system is, for a desktop and for a phone."""

# Shades of a token's background, shade0 to shade20.
SHADES = 20

STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #566170; --line: #d8dee6; --paper: #ffffff; --card: #f5f7fa;
  --a: #2563b8; --b: #c2570c; --few: #9aa5b1; --error: #b91c24; --warning: #8f5400; --note: #0c6b64; --good: #176b2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --soft: #a3afbe; --line: #38424f; --paper: #14181e;
  --card: #1d232b; --a: #6ea8fe; --b: #f5a34b; --few: #66717e; --error: #ff8a8e; --warning: #f0b64a;
  --note: #4fd1c5; --good: #56d364; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  color: var(--ink); background: var(--paper); max-width: 1060px; margin: 1.6rem auto 4rem; padding: 0 1.2rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; overflow-wrap: anywhere; }
.soft, p.of, .range { color: var(--soft); } p.of { margin: .25rem 0 1rem; font-size: .87rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 12px; margin: .8rem 0; }
.tile { display: flex; flex-direction: column; background: var(--card); border-top: 4px solid var(--hue);
  border-radius: 6px; padding: .55rem .8rem .6rem; --hue: var(--soft); }
.tile.healthy { --hue: var(--good); } .tile.watch { --hue: var(--warning); } .tile.alarm { --hue: var(--error); }
.tile .name { font-size: .8rem; line-height: 1.3; color: var(--soft); min-height: 2.6em; }
.tile b { font-size: 1.65rem; line-height: 1.3; font-variant-numeric: tabular-nums; color: var(--hue); }
.tile .range { font-size: .78rem; } .tile .state { color: var(--hue); font-weight: 600;
  margin-right: .5em; } .tile .range span { display: inline-block; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 22px 26px; }
figure { margin: 0; min-width: 0; max-width: 500px; }
figcaption { font-weight: 600; font-size: .87rem; margin-bottom: .25rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 10px; fill: var(--soft); }
svg text.small { font-size: 9px; } .grid { stroke: var(--line); stroke-width: .6; }
.frame { fill: none; stroke: var(--line); } .mark { stroke: var(--soft); stroke-dasharray: 4 3; stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; } .line.a { stroke: var(--a); } .line.b { stroke: var(--b); }
.line.thin { stroke-dasharray: 4 3; stroke-width: 1.4; } .dot.a, .bar.a { fill: var(--a); }
.dot.b, .bar.b { fill: var(--b); } .dot { fill-opacity: .85; } .bar { fill-opacity: .8; } .cell { fill: var(--a); }
.dot.few, .bar.few { fill: var(--few); } .bar.hollow { fill-opacity: 0; stroke: var(--b); stroke-width: 1.4; }
.key { font-weight: 400; color: var(--soft); margin-left: 12px; white-space: nowrap; } .key::before { content: "";
  display: inline-block; width: 18px; margin-right: 5px; vertical-align: middle; border-top: 3px solid var(--soft); }
.key.a::before { border-color: var(--a); } .key.b::before { border-color: var(--b); }
.key.few::before { border-color: var(--few); } .key.thin::before { border-top: 2px dashed; }
.key.thin.a::before { border-color: var(--a); } .key.thin.b::before { border-color: var(--b); }
table { border-collapse: collapse; font-size: .87rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.text, th.text { text-align: left; }
.wide { overflow-x: auto; } .card { background: var(--card); border-left: 5px solid var(--soft);
  padding: .6rem 1rem; margin: .7rem 0; border-radius: 4px; overflow-wrap: anywhere; }
.card ul { margin: .3rem 0; padding-left: 1.2rem; color: var(--soft); }
.card.error { border-color: var(--error); } .card.warning { border-color: var(--warning); }
.card.note { border-color: var(--note); } .card.good { border-color: var(--good); }
code { font-size: .85em; color: var(--soft); }
.record { border: 1px solid var(--line); border-radius: 6px; padding: .55rem .9rem .7rem; margin: .6rem 0; }
.record > div { margin-top: .45rem; } .where { font-weight: 600; margin-right: .7em; font-size: .9rem; }
.record .soft { font-size: .87rem; }
.context { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .82rem; line-height: 1.7;
  overflow-wrap: anywhere; }
.context span { padding: 1px 2px; border-radius: 2px; white-space: pre-wrap; }
.context span.at { outline: 2px solid var(--error); }
details { margin: .7rem 0; } summary { cursor: pointer; color: var(--a); padding: .2rem 0; overflow-wrap: anywhere; }
.best { display: flex; gap: 1rem; background: var(--card); border-radius: 6px; padding: .6rem 1rem .7rem;
  margin: .6rem 0; overflow-wrap: anywhere; } .best > div { min-width: 0; } .best b { font-size: 1.02rem; }
.rank { font-size: 1.5rem; line-height: 1.2; font-weight: 700; color: var(--a); min-width: 1ch; }
.chip { font-size: .75rem; color: var(--good); border: 1px solid var(--good); border-radius: 9px; padding: 0 .5em;
  margin-left: .7em; white-space: nowrap; } .best .soft { font-size: .9rem; } .best .alike { font-size: .8rem; }
.beside { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 26px; align-items: start; }
.beside p.of { margin-top: 0; } .beside th, .beside td { padding: .25rem .4rem; }
svg text.number { font-size: 10px; font-weight: 700; fill: var(--ink); }
.key.dot::before { width: 8px; height: 8px; border: 0; border-radius: 4px; background: var(--a); }
.key.b.dot::before { background: var(--b); } .key.none::before { display: none; } .key.none { white-space: normal; }
tr.best td.text { font-weight: 600; }
@media (max-width: 900px) { .beside { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 620px) { body { padding: 0 .9rem; margin-top: 1rem; } h1 { font-size: 1.25rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; } .tile:first-child { grid-column: 1 / -1; }
  .tile { padding: .4rem .7rem .5rem; } .tile .name { min-height: 0; } .tile b { font-size: 1.35rem; }
  svg text { font-size: 11px; } svg text.small { font-size: 10px; } th, td { padding: .25rem .5rem; } }
""" + "".join(
    f".shade{i} {{ background: color-mix(in srgb, var(--error) {50 * i // SHADES}%, transparent); }}\n"
    for i in range(SHADES + 1)
)
