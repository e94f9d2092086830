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
  color: var(--ink); background: var(--paper); max-width: 1060px; margin: 1.4rem auto 4rem; padding: 0 1.2rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
.soft, .of, .range { color: var(--soft); } .of { margin: .3rem 0 1rem; font-size: .85rem; overflow-wrap: anywhere; }
.strip { line-height: 1.45; font-size: .8rem; } .strip span { margin-right: 1.4em; }
.strip b { font-weight: 400; opacity: .8; margin-right: .4em; } .strip b::after { content: ":"; }
.tiles { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 12px; margin: .9rem 0; }
.tile { display: flex; flex-direction: column; background: var(--card); border-top: 4px solid var(--hue);
  border-radius: 6px; padding: .5rem .8rem .6rem; }
.tile, .tile b { --hue: var(--few); } .healthy, .tile b.healthy { --hue: var(--good); }
.watch, .tile b.watch { --hue: var(--warning); } .alarm, .tile b.alarm { --hue: var(--error); }
.blind b, .none b, .blind .state, .none .state { color: var(--soft) !important; }
.tile .name { font-size: .8rem; line-height: 1.3; color: var(--soft); min-height: 2.6em; }
.tile b { font-size: 1.6rem; line-height: 1.3; font-variant-numeric: tabular-nums; color: var(--hue); }
.tile b:nth-child(n+2), .tile b:not(:last-child) { font-size: 1.15rem; }
.tile code { font-size: .66rem; overflow-wrap: anywhere; line-height: 1.3; margin-top: auto; padding-top: .3rem; }
.tile .range { font-size: .78rem; } .tile .state { color: var(--hue); font-weight: 600; margin-right: .5em; }
.tile .range span { display: inline-block; }
.charts, .columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 22px 26px; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .87rem; margin-bottom: .25rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; overflow: visible; } svg text { font-size: 10px; fill: var(--soft); }
svg text.small { font-size: 9px; }
.grid { stroke: var(--line); stroke-width: .6; } .zero { stroke: var(--soft); stroke-width: .8; }
.frame { fill: none; stroke: var(--line); }
.line { fill: none; stroke-width: 1.8; } .line.a { stroke: var(--a); } .line.b { stroke: var(--b); }
.line.thin { stroke-dasharray: 4 3; stroke-width: 1.4; } .line.over { stroke: var(--ink); }
.line.b.over { stroke-dasharray: 2 2; } .line.mark { stroke: var(--soft); stroke-dasharray: 4 3; stroke-width: 1; }
.dot.a, .bar.a { fill: var(--a); } .dot.b, .bar.b { fill: var(--b); } .dot.over { fill: var(--ink); }
.dot { fill-opacity: .85; } .bar { fill-opacity: .8; } .cell { fill: var(--a); }
.dot.few, .bar.few { fill: none; stroke: var(--few); stroke-width: .8; }
.bar.hollow { fill-opacity: 0; stroke: var(--b); stroke-width: 1.4; }
.says { outline: none; cursor: default; } .says > rect, .says > circle { fill: var(--ink); fill-opacity: 0; }
.says:hover > rect, .says:focus > rect, .says:hover > circle, .says:focus > circle { fill-opacity: .12; }
.tip { display: none; pointer-events: none; } .says:hover > .tip, .says:focus > .tip { display: inline; }
svg:hover .says:focus:not(:hover) > .tip { display: none; }
.tip rect { fill: var(--paper); stroke: var(--soft); } svg .tip text { font-size: 10px; fill: var(--ink); }
.tip text:first-of-type { font-weight: 600; }
.key { font-weight: 400; color: var(--soft); margin-left: 12px; white-space: nowrap; } .key::before { content: "";
  display: inline-block; width: 18px; margin-right: 5px; vertical-align: middle; border-top: 3px solid var(--soft); }
.key.a::before { border-color: var(--a); } .key.b::before { border-color: var(--b); }
.key.few::before { border-color: var(--few); } .key.thin::before { border-top: 2px dashed; }
.key.over::before { border-top: 2px solid var(--ink); } .key.b.over::before { border-top-style: dotted; }
.key.thin.a::before { border-color: var(--a); } .key.thin.b::before { border-color: var(--b); }
table { border-collapse: collapse; font-size: .87rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.text, th.text { text-align: left; overflow-wrap: anywhere; }
.charts .wide table { width: 100%; } .charts th, .charts td { padding: .25rem .45rem; }
.card { background: var(--card); border-left: 5px solid var(--soft);
  padding: .6rem 1rem; margin: .7rem 0; border-radius: 4px; overflow-wrap: anywhere; } .card p { margin: .4rem 0 0; }
.card.found { display: grid; grid-template-columns: minmax(0, 1.15fr) minmax(0, 1fr); gap: 24px; }
.card .charts { margin-top: .8rem; }
.columns > div { min-width: 0; } .columns h2 { margin-top: .4rem; } .columns .found { grid-template-columns: 100%; }
.card ul { margin: .3rem 0; padding-left: 1.2rem; color: var(--soft); }
.card.error { border-color: var(--error); } .card.warning { border-color: var(--warning); }
.card.note { border-color: var(--note); } .card.good { border-color: var(--good); }
code { font-size: .85em; color: var(--soft); }
.record { border: 1px solid var(--line); border-radius: 6px; padding: .55rem .9rem .7rem; margin: .6rem 0; }
.record > div { margin-top: .45rem; } .where { font-weight: 600; margin-right: .7em; font-size: .9rem; }
.record .soft { font-size: .87rem; }
.context { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .82rem; line-height: 1.7;
  overflow-wrap: anywhere; }
.context span { padding: 1px 2px; border-radius: 2px; white-space: pre-wrap; position: relative; outline: none; }
.context span.at { outline: 2px solid var(--error); }
[data-says]:hover::after, [data-says]:focus::after { content: attr(data-says); position: absolute; bottom: 1.6em;
  left: 0; background: var(--paper); border: 1px solid var(--soft); border-radius: 3px; padding: 0 .5em; z-index: 1;
  white-space: nowrap; }
details { margin: .7rem 0; } summary { cursor: pointer; color: var(--a); padding: .2rem 0; overflow-wrap: anywhere; }
summary h2 { display: inline; color: var(--ink); }
body > details { border-top: 1px solid var(--line); padding-top: .5rem; margin: 1.1rem 0; }
@media (max-width: 900px) { .card.found { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 620px) { body { padding: 0 .9rem; margin-top: 1rem; } h1 { font-size: 1.25rem; }
  .charts, .columns { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; } .tile:first-child { grid-column: 1 / -1; }
  .tile { padding: .4rem .7rem .5rem; } .tile .name { min-height: 0; } .tile b { font-size: 1.35rem; }
  .strip span { display: block; margin: 0; outline: none; overflow: hidden; text-overflow: ellipsis;
    white-space: nowrap; } .strip span:focus { white-space: normal; }
  .card { padding: .6rem .8rem; } svg text { font-size: 11px; } svg text.small { font-size: 10px; }
  th, td { padding: .25rem .4rem; } td { overflow-wrap: anywhere; }
  .stacked table, .stacked tbody, .stacked tr, .stacked td { display: block; width: 100%; }
  .stacked thead { display: none; }
  .stacked tr { border-bottom: 1px solid var(--line); padding: .35rem 0; } .stacked td { border: 0; padding: 0; }
  .stacked td:first-child { font-weight: 600; }
  .stacked td:not(:first-child)::before { content: attr(data-head) " "; color: var(--soft); font-weight: 400;
    float: left; margin-right: .6em; } .stacked td.context::before { float: none; } }
""" + "".join(
    f".shade{i} {{ background: color-mix(in srgb, var(--error) {50 * i // SHADES}%, transparent); }}\n"
    for i in range(SHADES + 1)
)
