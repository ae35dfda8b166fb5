"""Style sheet of the HTML report: light and dark, for desktop, phone and print."""

from __future__ import annotations

from compound.report.figures.graph import PALETTE

DARK = {
    "ink": "#e4e7eb",
    "muted": "#98a2b0",
    "rule": "#343b45",
    "paper": "#15181d",
    "accent": "#7fb0f5",
    "good": "#63c78f",
    "llm": "#1d2f4d",
    "retriever": "#193827",
    "choice": "#43351a",
    "function": "#272c34",
    "flow": "#372747",
    "other1": "#e0a066",
    "other2": "#bd98de",
    "other3": "#5cc2c9",
    "soft": "#1d2127",
    "bad": "#f08a80",
    "old": "#4a2322",
    "new": "#173f29",
}
LIGHT = {**PALETTE, "soft": "#f6f7f9", "bad": "#b23a2f", "old": "#fbe3e0", "new": "#d9f2e2"}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:2.5rem 1.5rem 4rem;max-width:70rem;background:var(--paper);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
 overflow-wrap:anywhere}
h1,h2,h3,h4,h5,p,ul,ol,dl,dd,figure,pre{margin:0}
h1{font-size:1.9rem;line-height:1.2;font-weight:650;letter-spacing:-.015em;font-variant-numeric:tabular-nums}
h2{font-size:1.15rem;font-weight:650;margin-bottom:.9rem}
h3{font-size:.95rem;font-weight:600;margin:1.2rem 0 .5rem}
h4{font-size:.9rem;font-weight:600;font-variant-numeric:tabular-nums}
h5{font-size:.72rem;font-weight:600;color:var(--muted);text-transform:uppercase;letter-spacing:.06em;margin-bottom:.2rem}
.about{color:var(--muted);font-size:.87rem;margin-bottom:.5rem}
.lead{font-size:1.05rem;max-width:46rem;margin-top:1rem;padding-left:.9rem;border-left:3px solid var(--muted);
 font-variant-numeric:tabular-nums}
.lead.better{border-color:var(--good)}
.lead.worse{border-color:var(--bad)}
.notes{margin-top:.9rem;padding-left:1.1rem;max-width:46rem;color:var(--muted);font-size:.9rem}
nav{margin:2rem 0 0;padding:.6rem 0;border-top:1px solid var(--rule);border-bottom:1px solid var(--rule);
 display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.87rem}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
section{margin-top:2.6rem}
section>p{max-width:46rem;margin-top:.8rem;color:var(--muted);font-size:.9rem}
section>h2+p{margin-top:0}
section>figure+.wide,section>p+.wide{margin-top:1.2rem}
.wide{overflow-x:auto;background:
 linear-gradient(90deg,var(--paper) 40%,transparent) 0 0/3rem 100% no-repeat local,
 linear-gradient(270deg,var(--paper) 40%,transparent) 100% 0/3rem 100% no-repeat local,
 linear-gradient(90deg,var(--rule),transparent) 0 0/.6rem 100% no-repeat scroll,
 linear-gradient(270deg,var(--rule),transparent) 100% 0/.6rem 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums;line-height:1.4}
th,td{padding:.4rem .6rem;text-align:left;vertical-align:top;
 border-bottom:1px solid var(--rule);min-width:3rem;max-width:26rem;overflow-wrap:break-word}
th{font-weight:600;color:var(--muted);font-size:.8rem;vertical-align:bottom;border-bottom-color:var(--muted)}
th:first-child,td:first-child{padding-left:0}
th:last-child,td:last-child{padding-right:0}
.limits{display:block;color:var(--muted);font-size:.92em}
td.number,th.number{text-align:right}
td.number{white-space:nowrap}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.87em}
pre{background:var(--soft);border-radius:6px;padding:.8rem 1rem;overflow-x:auto;line-height:1.5;
 margin-top:.6rem}
figure svg{display:block;width:100%;height:auto}
figure svg text{font-family:inherit!important}
figcaption{color:var(--muted);font-size:.85rem;max-width:46rem;margin-top:.6rem}
.missing{background:var(--soft);border-radius:6px;padding:.7rem 1rem}
.change+.change{margin-top:1.4rem}
.text,.demos li{white-space:pre-wrap;background:var(--soft);border-radius:6px;padding:.8rem 1rem;
 font-size:.92rem}
.change>p{font-variant-numeric:tabular-nums}
del{background:var(--old);text-decoration-color:var(--bad);text-decoration-thickness:1px;border-radius:2px}
ins{background:var(--new);text-decoration:none;border-radius:2px}
.demos{list-style:none;padding:0;margin-top:.5rem;display:grid;gap:.5rem}
.demos li{display:grid;grid-template-columns:1fr auto 1fr;gap:.3rem 1rem;border-left:3px solid var(--rule)}
.demos li.new{border-left-color:var(--good)}
.demos li.removed{border-left-color:var(--bad)}
.demos li.removed dd{text-decoration:line-through;color:var(--muted)}
.state{grid-column:1/-1;color:var(--muted);font-size:.78rem}
.new .state{color:var(--good)}
.to{color:var(--muted)}
dl{display:grid;gap:.15rem}
dl>div{display:grid;grid-template-columns:minmax(5.5rem,auto) 1fr;gap:0 .8rem}
dt{color:var(--muted);font-size:.85rem}
dd{white-space:pre-wrap;font-size:.9rem;min-width:0}
.examples article{border-top:1px solid var(--rule);padding:.7rem 0 .9rem}
.sides{display:grid;grid-template-columns:1fr 1fr;gap:.7rem 2rem;margin-top:.5rem}
.side{min-width:0}
section>dl{margin-bottom:1.2rem}
section>dl>div{grid-template-columns:11rem 1fr}
@media (max-width:40rem){
 body{padding:1.4rem 1rem 3rem}
 h1{font-size:1.5rem}
 .sides,.demos li{grid-template-columns:1fr}
 section>dl>div{grid-template-columns:1fr;margin-bottom:.4rem}
}
@media print{
 html{font-size:72%}
 body{max-width:none;padding:0;font-size:9pt}
 nav{display:none}
 h2,h3,h4,figure,article,tr,.demos li{break-inside:avoid}
 h2,h3,h4{break-after:avoid}
 .wide{overflow:visible;background:none}
 table{font-size:7.5pt}
 .limits{white-space:nowrap}
 th,td{padding:.25rem .35rem}
 .limits{display:block;color:var(--muted);font-size:.92em}
td.number{white-space:normal}
 figure svg{min-width:0!important}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
)
