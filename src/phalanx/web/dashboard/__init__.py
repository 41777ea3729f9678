"""The page of a job: a process that asks the agent over its private socket, and serves browsers.

agent_link     asks the agent, and checks its user
page_state     a snapshot of the job as what the page shows (pure)
rate_history   step rates of every rank over time (pure)
job_feed       asks while somebody looks, and tells every viewer what has changed
log_files      the log files of this node's earlier starts, and nothing else
guard          token, Host and Origin of every request, and the headers of every answer
pages          the routes
static/        HTML, CSS and JavaScript modules, served as they are
"""
