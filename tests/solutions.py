"""What students write: solutions of the exercises of tests/handout.py, which `python tests/handout.py check` grades.

A solution is the source of its functions, or (old, new, old, new, ...) for lines that differ from the project's.
"""

WRONG, RIGHT = {}, {}           # {exercise: {what is wrong, or how it is done: solution}}

# ---- the losses on pairs

WRONG['multi_similarity_loss'] = {
    'mean of the exponentials of positives': (
        'log1p_sum_exp(-alpha * (s - lam), positive) / alpha',
        '(log1p_sum_exp(-alpha * (s - lam) - positive.sum(1, keepdim=True).clamp_min(1).log(), positive)) / alpha'),
    'miner by columns': ('.amin(dim=1, keepdim=True)', '.amin(dim=0, keepdim=True)',
                         '.amax(dim=1, keepdim=True)', '.amax(dim=0, keepdim=True)'),
    'miner on negatives only': ('positive & ~(s - epsilon >= hardest_negative)', 'positive'),
    'miner on positives only': ('negative & ~(s + epsilon <= hardest_positive)', 'negative'),
    'mean over anchors with a positive': ('(pull + push).mean()', '(pull + push)[positive.any(dim=1)].mean()'),
    'mean over anchors that cost': ('(pull + push).mean()',
                                    '(pull + push).sum() / ((pull + push) > 0).sum().clamp_min(1)'),
    'sum over anchors': ('(pull + push).mean()', '(pull + push).sum()'),
    'half precision stays': ('z = common.at_least_float32(z)', 'pass'),
    'oneself by value': ('mine(s, y, epsilon)\n', 'mine(s, y, epsilon)\n    positive = positive & (s < 1 - 1e-5)\n'),
    'exp overflows': ('log1p_sum_exp(beta * (s - lam), negative)',
                      '((beta * (s - lam)).exp() * negative).sum(dim=1).log1p()'),
    'one end detached': ('z @ z.T', 'z @ z.T.detach()'),
    'without the 1 +': ('log1p_sum_exp(beta * (s - lam), negative)',
                        '(beta * (s - lam)).masked_fill(~negative, -1e9).logsumexp(dim=1)'),
    'epsilon 0 is no miner': ('if epsilon is None else', 'if not epsilon else'),
    'easiest instead of hardest': ("(~positive, float('inf')).amin", "(~positive, float('-inf')).amax",
                                   "(~negative, float('-inf')).amax", "(~negative, float('inf')).amin"),
    'not divided by beta': ('negative) / beta', 'negative)'),
}
RIGHT['multi_similarity_loss'] = {
    'anchor by anchor': '''
def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=None):
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    s, zero, total = z @ z.T, z.new_zeros(1), 0
    positive, negative = pairs(y) if epsilon is None else mine(s, y, epsilon)
    for a in range(len(y)):
        p, n = s[a][positive[a]], s[a][negative[a]]
        total = total + torch.cat([zero, -alpha * (p - lam)]).logsumexp(0) / alpha
        total = total + torch.cat([zero, beta * (n - lam)]).logsumexp(0) / beta
    return total / len(y)


def mine(s, y, epsilon):
    positive, negative = pairs(y)
    for a in range(len(y)):
        p, n = s[a][positive[a]], s[a][negative[a]]
        if len(p) and len(n):
            positive[a] &= s[a] - epsilon < n.max()
            negative[a] &= s[a] + epsilon > p.min()
        else:
            positive[a] = negative[a] = False
    return positive, negative
''',
    'softplus of logsumexp': (
        'log1p_sum_exp(-alpha * (s - lam), positive) / alpha',
        'torch.nn.functional.softplus((-alpha * (s - lam)).masked_fill(~positive, -1e9).logsumexp(1)) / alpha'),
    'with < in the miner': ('~(s - epsilon >= hardest_negative)', '(s - epsilon < hardest_negative)',
                            '~(s + epsilon <= hardest_positive)', '(s + epsilon > hardest_positive)'),
}

WRONG['contrastive_loss'] = {
    'mean over all pairs': ('t.sum() / (t > 0).sum().clamp_min(1)', 't.mean()'),
    'mean over pairs that reach their goal too': (
        'return mean_nonzero(pull) + mean_nonzero(push)',
        'return pull.sum() / positive.sum().clamp_min(1) + push.sum() / negative.sum().clamp_min(1)'),
    'one mean for both kinds': ('return mean_nonzero(pull) + mean_nonzero(push)', 'return mean_nonzero(pull + push)'),
    'sum': ('t.sum() / (t > 0).sum().clamp_min(1)', 't.sum()'),
    'margins swapped': ('(d - pos_margin)', '(d - neg_margin)', '(neg_margin - d)', '(pos_margin - d)'),
    'always squared': ('(d - pos_margin).clamp_min(0).pow(power)', '(d - pos_margin).clamp_min(0).pow(2)'),
    'an image is its own positive': ('.masked_fill(~positive, 0)', '.masked_fill(negative, 0)'),
    'squared distances': ('d = distances(common.at_least_float32(z))', 'd = distances(common.at_least_float32(z)) ** 2'),
    'NaN without positives': ('.clamp_min(1)', ''),
    'half precision stays': ('common.at_least_float32(z)', 'z'),
    'images detached': ('common.at_least_float32(z)', 'common.at_least_float32(z).detach()'),
    'hinges missing': ('(neg_margin - d).clamp_min(0)', '(neg_margin - d)'),
}
RIGHT['contrastive_loss'] = {
    'pairs of the upper triangle': '''
def contrastive_loss(z, y, pos_margin=0.0, neg_margin=0.5, power=1):
    z = common.at_least_float32(z)
    i, j = torch.triu_indices(len(y), len(y), 1)
    d, same = (z[i] - z[j]).norm(dim=1), y[i] == y[j]
    pull, push = torch.relu(d[same] - pos_margin) ** power, torch.relu(neg_margin - d[~same]) ** power
    return sum(t.sum() / max(int((t > 0).sum()), 1) for t in (pull, push))
''',
    'mean of the chosen entries': (
        't.sum() / (t > 0).sum().clamp_min(1)', 't[t > 0].mean() if (t > 0).any() else 0 * t.sum()'),
}
WRONG['contrastive_similarity_loss'] = {
    'margin on positives': ('pull = -s.masked_fill(~positive, 0)',
                            'pull = (margin - s).clamp_min(0).masked_fill(~positive, 0)'),
    'mean over anchors with a positive': ('(pull + push).mean()', '(pull + push)[positive.any(dim=1)].mean()'),
    'mean over all negatives': ('(excess > 0).sum(dim=1)', 'negative.sum(dim=1)'),
    'always sum': ("if reduction == 'mean':", 'if False:'),
    'always mean': ("if reduction == 'mean':", 'if True:'),
    'sum over anchors': ('(pull + push).mean()', '(pull + push).sum()'),
    'oneself by value': ('~positive, 0', '~(positive & (s < 1 - 1e-5)), 0'),
    'an image is its own positive': ('~positive, 0', 'negative, 0'),
    'half precision stays': ('z = common.at_least_float32(z)', 'pass'),
    'one end detached': ('z @ z.T', 'z @ z.T.detach()'),
    'margin ignored': ('s - margin', 's - 0.5'),
    'no hinge': ('(s - margin).clamp_min(0)', '(s - margin)'),
}
RIGHT['contrastive_similarity_loss'] = {
    'anchor by anchor': '''
def contrastive_similarity_loss(z, y, margin=0.5, reduction='mean'):
    z, losses = common.at_least_float32(z), []
    for a in range(len(y)):
        others = torch.arange(len(y)) != a
        p, n = z[others & (y == y[a])] @ z[a], torch.relu(z[y != y[a]] @ z[a] - margin)
        if reduction == 'mean':
            losses.append(-p.sum() / max(len(p), 1) + n.sum() / max(int((n > 0).sum()), 1))
        else:
            losses.append(-p.sum() + n.sum())
    return torch.stack(losses).mean()
''',
}

# ---- the losses with a vector for each class

WRONG['proxy_anchor_loss'] = {
    'proxies not normalised': ('F.normalize(proxies, dim=1)', 'proxies'),
    'proxies detached': ('F.normalize(proxies, dim=1)', 'F.normalize(proxies, dim=1).detach()'),
    'images detached': ('@ z.T', '@ z.detach().T'),
    'pull divided by all classes': ('.sum() / present', '.mean()'),
    'push divided by the classes present': ('~positive).mean()', '~positive).sum() / present'),
    'push by present proxies only': ('~positive).mean()', '~positive)[positive.any(dim=1)].mean()'),
    'margin of negatives with minus': ('(s + delta)', '(s - delta)'),
    'divided by alpha': ('return pull + push', 'return (pull + push) / alpha'),
    'exp overflows': ('log1p_sum_exp(alpha * (s + delta), ~positive)',
                      '((alpha * (s + delta)).exp() * ~positive).sum(dim=1).log1p()'),
    'half precision stays': ('z, proxies = common.at_least_float32(z, proxies)', 'pass'),
    'proxies of the labels only': ('F.normalize(proxies, dim=1)', 'F.normalize(proxies[:int(y.max()) + 1], dim=1)',
                                   'torch.arange(len(proxies)', 'torch.arange(int(y.max()) + 1'),
    'images as anchors': ('log1p_sum_exp(-alpha * (s - delta), positive).sum() / present',
                          'log1p_sum_exp((-alpha * (s - delta)).T, positive.T).mean()'),
}
RIGHT['proxy_anchor_loss'] = {
    'proxy by proxy': '''
def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    z, proxies = common.at_least_float32(z, proxies)
    pull, push, zero = [], [], z.new_zeros(1)
    for k in range(len(proxies)):
        s = F.cosine_similarity(z, proxies[k:k + 1], dim=1)
        if (y == k).any():
            pull.append(torch.cat([zero, -alpha * (s[y == k] - delta)]).logsumexp(0))
        push.append(torch.cat([zero, alpha * (s[y != k] + delta)]).logsumexp(0))
    return sum(pull) / len(pull) + sum(push) / len(push)
''',
    'images normalised again': ('@ z.T', '@ F.normalize(z, dim=1).T'),
}
WRONG['proxynca_loss'] = {
    'own proxy in the denominator': ("others = s.masked_fill(own, float('-inf'))", 'others = s'),
    'mean': ('- s[own]).sum()', '- s[own]).mean()'),
    'distances': ('s = cosines(z, proxies)', 's = -torch.cdist(*common.at_least_float32(z, F.normalize(proxies)))'),
    'proxies not normalised': ('s = cosines(z, proxies)', 's = torch.matmul(*common.at_least_float32(z, proxies.T))'),
    'proxies detached': ('cosines(z, proxies)', 'cosines(z, proxies.detach())'),
    'images detached': ('cosines(z, proxies)', 'cosines(z.detach(), proxies)'),
    'half precision stays': ('cosines(z, proxies)', 'z @ F.normalize(proxies, dim=1).T'),
    'infinite with one class': ('len(proxies) == 1', 'len(proxies) == 0'),
    'maximum': ('others.logsumexp(dim=1)', 'others.amax(dim=1)'),
}
RIGHT['proxynca_loss'] = {
    'exp and log of cosines': '''
def proxynca_loss(z, y, proxies):
    s, loss = cosines(z, proxies), 0
    for i in range(len(y)):
        others = torch.cat([s[i, :y[i]], s[i, y[i] + 1:]])
        loss = loss - s[i, y[i]] + (others.exp().sum().log() if len(others) else 0)
    return loss
''',
}
WRONG['proxynca_pp_loss'] = {
    'scale 1/T': ('2 / temperature', '1 / temperature'),
    'times T': ('2 / temperature', '2 * temperature'),
    'distances not squared': ('2 / temperature * cosines(z, proxies)',
                              '-torch.cdist(*common.at_least_float32(z, F.normalize(proxies))) / temperature'),
    'sum': (', y)', ", y, reduction='sum')"),
    'T ignored': ('2 / temperature', '18'),
    'proxies detached': ('cosines(z, proxies)', 'cosines(z, proxies.detach())'),
    'images detached': ('cosines(z, proxies)', 'cosines(z.detach(), proxies)'),
    'proxies not normalised': ('cosines(z, proxies)', 'torch.matmul(*common.at_least_float32(z, proxies.T))'),
    'half precision stays': ('cosines(z, proxies)', 'z @ F.normalize(proxies, dim=1).T'),
    'log of a softmax of exp': '''
def proxynca_pp_loss(z, y, proxies, temperature=1 / 9):
    p = (-(2 - 2 * cosines(z, proxies)) / temperature).exp()
    return -(p[torch.arange(len(y)), y] / p.sum(dim=1)).log().mean()
''',
    'own proxy not in the denominator': '''
def proxynca_pp_loss(z, y, proxies, temperature=1 / 9):
    s = 2 / temperature * cosines(z, proxies)
    own = F.one_hot(y, len(proxies)).bool()
    return (s.masked_fill(own, float('-inf')).logsumexp(dim=1) - s[own]).mean()
''',
}
RIGHT['proxynca_pp_loss'] = {
    'squared distances': '''
def proxynca_pp_loss(z, y, proxies, temperature=1 / 9):
    z, p = common.at_least_float32(z, proxies)
    d2 = (z[:, None] - F.normalize(p, dim=1)).square().sum(dim=2)
    return -torch.log_softmax(-d2 / temperature, dim=1).gather(1, y[:, None]).mean()
''',
}
WRONG['center_contrastive_loss'] = {
    'stop_grad ignored': ('(c.detach() if stop_grad else c)', 'c'),
    'stop_grad cuts the centre term': ('(c.detach() if stop_grad else c)', 'c', '(z * c[y])',
                                       '(z * (c.detach() if stop_grad else c)[y])'),
    'stop_grad cuts both': ('c = F.normalize(centers, dim=1)',
                            'c = F.normalize(centers.detach() if stop_grad else centers, dim=1)'),
    'stop_grad cuts the images': ('z @ (c.detach() if stop_grad else c).T', '(z.detach() if stop_grad else z) @ c.T'),
    'smoothing ignored': ('smooth_labels(y, len(c), smoothing, logits.dtype)', 'y'),
    "torch's smoothing": ('smooth_labels(y, len(c), smoothing, logits.dtype)', 'y, label_smoothing=smoothing'),
    'centre term smoothed': ('lam * center', '(1 - smoothing) * lam * center'),
    'centre term in the softmax': ('(cosine - margin * own)', '(cosine - margin * own) + 2 * lam * cosine * own',
                                   'contrast + lam * center', 'contrast + 2 * lam'),
    'distance not squared': ('2 - 2 * (z * c[y]).sum(dim=1)', '(z - c[y]).norm(dim=1)'),
    'half of the squared distance': ('2 - 2 *', '1 -'),
    'margin not scaled': ('s * (cosine - margin * own)', 's * cosine - margin * own'),
    'margin added': ('cosine - margin', 'cosine + margin'),
    'margin of all classes': ('margin * own', 'margin'),
    'centres not normalised': ('c = F.normalize(centers, dim=1)', 'c = centers'),
    'distance to raw centres': ('2 - 2 * (z * c[y]).sum(dim=1)', '(z - centers[y]).square().sum(dim=1)'),
    'centres detached': ('F.normalize(centers, dim=1)', 'F.normalize(centers.detach(), dim=1) + 0 * centers'),
    'images detached': ('z @ (c', 'z.detach() @ (c'),
    'sum over the batch': ('.mean()', '.sum()'),
    'half precision stays': ('z, centers = common.at_least_float32(z, centers)', 'pass'),
    'exp overflows': ("F.cross_entropy(logits, smooth_labels(y, len(c), smoothing, logits.dtype), reduction='none')",
                      '-(smooth_labels(y, len(c), smoothing) * (logits.exp() / logits.exp().sum(1, True)).log()).sum(1)'),
}
RIGHT['center_contrastive_loss'] = {
    'as in the header': ('2 - 2 * (z * c[y]).sum(dim=1)', '(z - c[y]).square().sum(dim=1)'),
    'margin in float32': ('margin * own', 'margin * F.one_hot(y, len(c))'),
    "torch's smoothing, scaled": ('smooth_labels(y, len(c), smoothing, logits.dtype)',
                                  'y, label_smoothing=smoothing * len(c) / (len(c) - 1)'),
    'image by image': '''
def center_contrastive_loss(z, y, centers, s=16.0, margin=0.0, lam=2.0, smoothing=0.0, stop_grad=False):
    z, centers = common.at_least_float32(z, centers)
    c, total = centers / centers.norm(dim=1, keepdim=True), 0
    for x, label in zip(z, y):
        logits = s * torch.mv(c.detach() if stop_grad else c, x)
        logits = torch.where(torch.arange(len(c)) == label, logits - s * margin, logits)
        others = logits.logsumexp(0) - torch.cat([logits[:label], logits[label + 1:]])
        contrast = (1 - smoothing) * (logits.logsumexp(0) - logits[label]) + smoothing * others.mean()
        total = total + contrast + lam * (x - c[label]).square().sum()
    return total / len(z)
''',
}
